"""The course of a run: groups of seeds on their way through the tasks, and the trace they fill."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch

from forgetless.data import Scenario, Split, Task
from forgetless.methods.orthogonal import Orthogonal
from forgetless.subspace import Storage
from forgetless.subspace.footprint import Footprint, budget_of, fitting_storage, shortage
from forgetless.support import signals
from forgetless.support.errors import ConfigError, MemoryShortageError
from forgetless.support.sizes import AUTO, parsed_bytes
from forgetless.tangent import TangentFeatures
from forgetless.trace import Trace
from forgetless.training.learner import Learner
from forgetless.training.resume.saving import Position, Saved, Saver
from forgetless.training.resume.snapshot import Mark
from forgetless.training.settings import Observer, Progress, Training
from forgetless.training.view import batch_of

Keep = Literal["all", "weights", "nothing"]
# Samples by whose features the memory of a run is estimated.
_FEW = 4


@final
@dataclass(frozen=True)
class Course:
    """What all groups of seeds of a run share."""

    scenario: Scenario
    training: Training
    trace: Trace
    keep: Keep
    saver: Saver
    observer: Observer | None

    @property
    def groups(self) -> Sequence[tuple[int, ...]]:
        """The seeds that train together."""
        return self.saver.groups

    def learn(self, learner: Learner, number: int, saved: Saved | None) -> None:
        """All tasks with a group of seeds, from where it was stopped if it was."""
        stage = _Stage(self, learner, number)
        if saved is not None and saved.has_learner:
            self.saver.restore(saved, learner)
            stage.learn_all(saved.position)
        else:
            self.saver.begin(learner)
            stage.learn_all(Position(number, 0))

    def within_budget(self, learner: Learner) -> Storage | None:
        """How directions are kept so that they fit the budget, if there is one."""
        budget = self.training.budget
        if not budget:
            return None
        needs = self._footprint(learner)
        if needs is None:
            return None  # a method without directions, among others that have some
        device = learner.network.theta.device
        room = budget_of(device) if budget == AUTO else parsed_bytes(budget)
        storage = fitting_storage(needs, room, device)
        learner.keep_in(storage)
        most = storage.max_rank
        fewer = "" if most is None else f", {most} of {needs.directions} directions"
        self.trace.config["storage_chosen"] = f"{storage}{fewer}"
        return storage

    def shortage(self, error: BaseException, learner: Learner) -> MemoryShortageError:
        """What to say when memory did not suffice."""
        device = learner.network.theta.device
        needs = None
        try:
            if device.type == "cuda":
                torch.cuda.empty_cache()
            needs = self._footprint(learner)
        except (RuntimeError, ConfigError):
            pass  # not even for a few samples' features is there room
        learned = int(np.isfinite(self.trace.accuracy[:, :, 0]).any(0).sum())
        where = f"in task {min(learned + 1, self.scenario.n_tasks)}"
        return shortage(error, where, device, needs, learner.storage)

    def _footprint(self, learner: Learner) -> Footprint | None:
        """What the method's directions take at the end, None if it keeps none."""
        if not isinstance(learner.method, Orthogonal):
            return None
        train = self.scenario.task(0, learner.seeds).train
        demand = learner.method.demand(len(train))
        counts = {"tasks": self.scenario.n_tasks, "seeds": len(learner.seeds)}
        return Footprint.of(few_features(learner, train), demand, **counts)


def few_features(learner: Learner, split: Split) -> TangentFeatures:
    """φ of a task's first samples, for the first seed."""
    theta = learner.network.theta
    index = torch.arange(min(_FEW, len(split)), device=theta.device).expand(len(theta), -1)
    samples = batch_of(split.to(theta.device, theta.dtype), index, 0)
    return learner.network.features(samples, 0)


@final
@dataclass(frozen=True)
class _Stage:
    """One group of seeds on its way through the tasks."""

    course: Course
    learner: Learner
    group: int

    def learn_all(self, start: Position) -> None:
        course, learner = self.course, self.learner
        training, saver = course.training, course.saver
        network = learner.network
        dtype, device = network.theta.dtype, network.theta.device
        tests = self._earlier_tests(start)
        for t, task, mark in self._tasks(start.task, ahead=device.type != "cpu"):
            saver.see(t, mark)
            train = task.train.to(device, dtype)
            tests[t] = task.test.to(device, dtype)
            if not (start.consolidated and t == start.task):
                with self._timed("training"):
                    for epoch in learner.train(train, t, training.epochs, saver.due):
                        self._report(t, epoch, self._mean_accuracy(t - 1))
                        self._pause(Position(self.group, t))
                # What would be remembered of the last task is of use only to those who read it.
                if t + 1 < course.scenario.n_tasks or course.keep == "all":
                    here = Position(self.group, t)
                    with self._timed("consolidation"), self._interruptible(here):
                        learner.consolidate(train, t)
            with self._timed("evaluation"), self._interruptible(Position(self.group, t, True)):
                self._evaluate(t, tests)
            self._record(t, task.name)
            self._report(t, training.epochs, self._mean_accuracy(t))
            self._after_task(t)

    def _tasks(self, first: int, *, ahead: bool) -> Iterator[tuple[int, Task, str]]:
        """The tasks in their order, and the saver's marks of their data.

        With `ahead` the next one is made while one is learned.
        """
        scenario, seeds = self.course.scenario, self.learner.seeds

        def made(t: int) -> tuple[Task, str]:
            task = scenario.task(t, seeds)
            return task, self.course.saver.mark_of(task)

        with ThreadPoolExecutor(1) as pool:
            coming = None
            for t in range(first, scenario.n_tasks):
                with self._interruptible(Position(self.group, t)):
                    task, mark = coming.result() if coming else made(t)
                if ahead and t + 1 < scenario.n_tasks:
                    coming = pool.submit(made, t + 1)
                yield t, task, mark

    def _earlier_tests(self, start: Position) -> dict[int, Split]:
        """The test sets of the tasks that were learned before the run was stopped."""
        course, theta = self.course, self.learner.network.theta
        tests: dict[int, Split] = {}
        everything = course.training.evaluate == "all" and start != Position(self.group, 0)
        for t in range(course.scenario.n_tasks if everything else start.task):
            signals.raise_pending()  # all of this is saved already
            task = course.scenario.task(t, self.learner.seeds)
            if t < start.task:
                course.saver.see(t, course.saver.mark_of(task))
            tests[t] = task.test.to(theta.device, theta.dtype)
        return tests

    def _evaluate(self, t: int, tests: dict[int, Split]) -> None:
        course = self.course
        if course.training.evaluate == "all" and t == 0:
            theta = self.learner.network.theta
            for later in range(1, course.scenario.n_tasks):
                test = course.scenario.task(later, self.learner.seeds).test
                tests[later] = test.to(theta.device, theta.dtype)
        found = {s: self.learner.accuracy(x, course.scenario.classes(s)) for s, x in tests.items()}
        for s, accuracy in found.items():
            course.trace.accuracy[self._rows(), t, s] = accuracy.numpy()

    def _record(self, t: int, name: str) -> None:
        """Note the task in the trace, on disk if it has a folder."""
        learner, trace, keep = self.learner, self.course.trace, self.course.keep
        trace.tasks = (*trace.tasks[:t], name, *trace.tasks[t + 1 :])
        last = t == self.course.scenario.n_tasks - 1
        for row, seed in enumerate(learner.seeds):
            if keep != "nothing":
                trace.keep_weights(seed, t, learner.network.state_dict(row))
            if keep == "all" and last:
                seen = learner.method.keeps_all_data  # and is in the dataset already
                trace.keep_memory(seed, {} if seen else learner.state.tensors(row))
        trace.save_record()

    def _after_task(self, t: int) -> None:
        """Save where the run is: before the next task, or between two groups of seeds."""
        saver = self.course.saver
        if t + 1 < self.course.scenario.n_tasks:
            saver.save_after_task(Position(self.group, t + 1), self.learner)
        elif self.group + 1 < len(self.course.groups):
            saver.save_after_task(Position(self.group + 1, 0), None)

    def _pause(self, position: Position) -> None:
        """Between two steps: save if it is time, and end if a signal asks for it."""
        if self.course.saver.due():
            self.learner.watch.look()  # nothing broken is saved
            self.course.saver.save(position, self.learner)
            signals.raise_pending()

    @contextmanager
    def _interruptible(self, position: Position) -> Iterator[None]:
        """What a signal ends at once; as if it had not begun, the run is saved before it."""
        if not self.course.saver.active:
            yield
            return
        mark = Mark.of(self.learner)
        try:
            with signals.interruptible():
                yield
        except signals.Stopped:
            mark.rewind(self.learner)
            self.course.saver.save(position, self.learner)
            raise

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started, saving = time.perf_counter(), self.course.saver.seconds
        try:
            yield
            if self.learner.network.theta.is_cuda:
                torch.cuda.synchronize()
        finally:
            seconds = time.perf_counter() - started - (self.course.saver.seconds - saving)
            self.course.trace.timings[part] += seconds
            self.course.trace.timings["total"] += seconds

    def _rows(self) -> list[int]:
        return [self.course.trace.seeds.index(seed) for seed in self.learner.seeds]

    def _mean_accuracy(self, t: int) -> float | None:
        accuracy = self.course.trace.accuracy
        return float(accuracy[self._rows(), t, : t + 1].mean()) if t >= 0 else None

    def _report(self, t: int, epoch: int, accuracy: float | None) -> None:
        course = self.course
        if course.observer is None:
            return
        epochs, tasks = course.training.epochs, course.scenario.n_tasks
        done = (self.group + (t + epoch / epochs) / tasks) / len(course.groups)
        place = self.learner.seeds, t + 1, tasks, epoch, epochs, done, accuracy
        course.observer(Progress(*place, course.trace.accuracy[self._rows(), t].tolist()))
