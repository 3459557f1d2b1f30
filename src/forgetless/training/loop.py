"""A run: groups of seeds go through the tasks one after another and fill the trace."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from forgetless.data import Scenario, Split, Task
from forgetless.methods.state import state_tensors
from forgetless.subspace import Storage
from forgetless.subspace.footprint import (
    Footprint,
    budget_of,
    fitting_storage,
    is_shortage,
    shortage,
)
from forgetless.support import signals
from forgetless.support.errors import ConfigError, MemoryShortageError, TraceError
from forgetless.support.streams import global_stream
from forgetless.tangent import TangentFeatures
from forgetless.trace import Keep, Trace, make_room, remove_unfinished
from forgetless.trace.metrics import tasks_learned
from forgetless.training.description import task_fingerprint
from forgetless.training.learner import Learner
from forgetless.training.resume.saving import LoadedCheckpoint, Position, Saver
from forgetless.training.resume.snapshot import Savepoint
from forgetless.training.sampling import batch_of
from forgetless.training.settings import Observer, Progress, Training
from forgetless.training.threads import Threads

MakeLearner = Callable[[Sequence[int], Storage | None], Learner]
# Samples from whose features the memory of a run is estimated.
_FEW = 4


@final
@dataclass(frozen=True)
class TrainingRun:
    """All groups of seeds of a run.

    Arguments:
        scenario, training, keep, observer: as in `fit`.
        trace: filled on the way.
        saver: writes and reads its checkpoints.
        make: from seeds and a storage (None for that of the training) to their learner.
        threads: for each part of it.
    """

    scenario: Scenario
    training: Training
    trace: Trace
    keep: Keep
    saver: Saver
    observer: Observer | None
    make: MakeLearner
    threads: Threads

    def start(self, *, overwrite: bool) -> None:
        """Train all groups, from the beginning or from the checkpoint in the trace's folder."""
        trace, saver = self.trace, self.saver
        loaded = None if overwrite else saver.load()
        storage = None if loaded is None else loaded.storage
        learner: Learner | None = None
        try:
            for number in range(0 if loaded is None else loaded.position.group, len(saver.groups)):
                learner = None  # frees its memory before the next one is made
                learner = self.make(saver.groups[number], storage)
                self.threads.plan(learner.network, learner.method, self.scenario, self.training)
                trace.versions["threads"] = str(self.threads.count("training"))
                if loaded is None and number == 0:
                    storage = self._within_budget(learner)
                    if trace.path is not None:
                        make_room(trace.path, overwrite=overwrite)
                        saver.remove()
                elif trace.path is not None:
                    remove_unfinished(trace.path)
                with global_stream(learner.seeds[0], "training"):
                    self._train(learner, number, loaded)
                loaded = None
            trace.status = "complete"
            trace.save_record()
            saver.remove()
        except BaseException as error:
            trace.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            if np.isfinite(trace.accuracy).any():
                with suppress(TraceError):  # report the original error, not this one
                    trace.save_record()
            if is_shortage(error) and learner is not None:
                raise self._shortage(error, learner) from error
            raise

    def _train(self, learner: Learner, number: int, loaded: LoadedCheckpoint | None) -> None:
        """Train a group of seeds on all tasks."""
        start = Position(number, 0)
        if loaded is not None and loaded.has_learner:
            self.saver.restore(loaded, learner)
            start = loaded.position
        else:
            self.saver.begin(learner)
        _GroupLoop(self, learner, number).learn_all(start)

    def _within_budget(self, learner: Learner) -> Storage | None:
        """The storage that keeps directions within the budget, if there is one."""
        budget = self.training.budget
        if not budget:
            return None
        needs = self._footprint(learner)
        if needs is None:  # no directions, or of a kind of their own (see `Learner.consolidate`)
            return None
        device = learner.network.theta.device
        storage = fitting_storage(needs, budget_of(device, budget), device)
        learner.use_storage(storage)
        most = storage.max_rank
        fewer = "" if most is None else f", {most} of {needs.directions} directions"
        self.trace.outcome["storage"] = f"{storage}{fewer}"
        return storage

    def _shortage(self, error: BaseException, learner: Learner) -> MemoryShortageError:
        """The error to raise when memory did not suffice."""
        device = learner.network.theta.device
        needs = None
        with suppress(RuntimeError, ConfigError):  # even a few samples' features may not fit
            if device.type == "cuda":
                torch.cuda.empty_cache()
            needs = self._footprint(learner)
        learned = max(map(tasks_learned, self.trace.accuracy))
        where = f"in task {min(learned + 1, self.scenario.n_tasks)}"
        return shortage(error, where, device, needs, learner.view.storage)

    def _footprint(self, learner: Learner) -> Footprint | None:
        """The memory of the method's directions after the last task, None if it stores none."""
        train = self.scenario.task(0, learner.seeds).train
        demand = learner.method.demand(len(train))
        if demand is None:
            return None
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
class _GroupLoop:
    """One group of seeds on its way through the tasks of a run."""

    run: TrainingRun
    learner: Learner
    group: int

    def learn_all(self, start: Position) -> None:
        """Train on each task, let the method store it, evaluate, record."""
        run, learner = self.run, self.learner
        n_tasks, epochs = run.scenario.n_tasks, run.training.epochs
        dtype, device = learner.network.theta.dtype, learner.network.theta.device
        tests = self._earlier_tests(start)
        for t, task, checksum in self._tasks(start.task, ahead=device.type != "cpu"):
            run.saver.check_data(t, checksum)
            fingerprints = run.trace.fingerprint["data"]
            if t == len(fingerprints):
                fingerprints.append(task_fingerprint(task))
            train = task.train.to(device, dtype)
            tests[t] = task.test.to(device, dtype)
            before, after = Position(self.group, t), Position(self.group, t, consolidated=True)
            if start != after:
                with self._timed("training"):
                    for epoch in learner.train(train, t, epochs, run.saver.due):
                        self._report(t, epoch, self._mean_accuracy(t - 1))
                        self._pause(before)
                # Memory of the last task is of use only to readers of the trace.
                if t + 1 < n_tasks or run.keep == "all":
                    with self._timed("consolidation"), self._interruptible(before):
                        learner.consolidate(train, t)
            with self._timed("evaluation"), self._interruptible(after):
                self._evaluate(t, tests)
            self._record(t, task.name)
            self._report(t, epochs, self._mean_accuracy(t))
            if t + 1 < n_tasks:
                run.saver.save_after_task(Position(self.group, t + 1), learner)
            elif self.group + 1 < len(run.saver.groups):
                run.saver.save_after_task(Position(self.group + 1, 0), None)

    def _tasks(self, first: int, *, ahead: bool) -> Iterator[tuple[int, Task, str]]:
        """The tasks in their order with the checksums of their data.

        With `ahead` the next one is made while one is learned.
        """

        def made(t: int) -> tuple[Task, str]:
            task = self.run.scenario.task(t, self.learner.seeds)
            return task, self.run.saver.checksum(task)

        with ThreadPoolExecutor(1) as pool:
            coming = None
            for t in range(first, self.run.scenario.n_tasks):
                with self._interruptible(Position(self.group, t)):
                    task, checksum = coming.result() if coming else made(t)
                if ahead and t + 1 < self.run.scenario.n_tasks:
                    coming = pool.submit(made, t + 1)
                yield t, task, checksum

    def _earlier_tests(self, start: Position) -> dict[int, Split]:
        """The test sets that a resumed run evaluates on, of tasks before its present one or all."""
        run, theta = self.run, self.learner.network.theta
        tests: dict[int, Split] = {}
        everything = run.training.evaluate == "all" and start != Position(self.group, 0)
        for t in range(run.scenario.n_tasks if everything else start.task):
            signals.raise_pending()  # all of this is saved already
            task = run.scenario.task(t, self.learner.seeds)
            if t < start.task:
                run.saver.check_data(t, run.saver.checksum(task))
            tests[t] = task.test.to(theta.device, theta.dtype)
        return tests

    def _evaluate(self, t: int, tests: dict[int, Split]) -> None:
        run = self.run
        if run.training.evaluate == "all" and t == 0:
            theta = self.learner.network.theta
            for later in range(1, run.scenario.n_tasks):
                test = run.scenario.task(later, self.learner.seeds).test
                tests[later] = test.to(theta.device, theta.dtype)
        for s, test in tests.items():
            accuracy = self.learner.accuracy(test, run.scenario.competing(s, t))
            run.trace.accuracy[self._rows, t, s] = accuracy.numpy()

    def _record(self, t: int, name: str) -> None:
        """Note the task in the trace, on disk if it has a folder."""
        learner, trace, keep = self.learner, self.run.trace, self.run.keep
        trace.tasks = (*trace.tasks[:t], name, *trace.tasks[t + 1 :])
        last = t == self.run.scenario.n_tasks - 1
        for row, seed in enumerate(learner.seeds):
            if keep != "nothing":
                trace.keep_weights(seed, t, learner.network.state_dict(row))
            if keep == "all" and last:
                known = learner.method.keeps_all_data  # the dataset has it already
                trace.keep_state(seed, {} if known else state_tensors(learner.state, row))
        trace.save_record()

    def _pause(self, position: Position) -> None:
        """Between two steps: save if it is time, and end if a signal asks for it."""
        if self.run.saver.due():
            self.learner.watch.check()  # nothing broken is saved
            self.run.saver.save(position, self.learner)
            signals.raise_pending()

    @contextmanager
    def _interruptible(self, position: Position) -> Iterator[None]:
        """A block that a signal ends at once, after saving the run as it was before the block."""
        if not self.run.saver.active:
            yield
            return
        savepoint = Savepoint.of(self.learner)
        try:
            with signals.interruptible():
                yield
        except signals.Stopped:
            savepoint.restore(self.learner)
            self.run.saver.save(position, self.learner)
            raise

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        saver, timings = self.run.saver, self.run.trace.timings
        started, saving = time.perf_counter(), saver.seconds
        try:
            with self.run.threads.use(part):
                yield
            if self.learner.network.theta.is_cuda:
                torch.cuda.synchronize()
        finally:
            seconds = time.perf_counter() - started - (saver.seconds - saving)
            timings[part] += seconds
            timings["total"] += seconds

    @property
    def _rows(self) -> list[int]:
        """The group's rows in the accuracy matrix."""
        return [self.run.trace.seeds.index(seed) for seed in self.learner.seeds]

    def _mean_accuracy(self, t: int) -> float | None:
        accuracy = self.run.trace.accuracy
        return float(accuracy[self._rows, t, : t + 1].mean()) if t >= 0 else None

    def _report(self, t: int, epoch: int, accuracy: float | None) -> None:
        run = self.run
        if run.observer is None:
            return
        epochs, tasks = run.training.epochs, run.scenario.n_tasks
        done = (self.group + (t + epoch / epochs) / tasks) / len(run.saver.groups)
        measured = run.trace.accuracy[self._rows, t].tolist()
        run.observer(
            Progress(self.learner.seeds, t + 1, tasks, epoch, epochs, done, accuracy, measured)
        )
