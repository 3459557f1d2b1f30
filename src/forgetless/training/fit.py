"""Train a model on a sequence of tasks: scenario × model × method × seeds → trace.

On a CPU each part of a run gets few threads where there is little work for each: small products
take longer to hand out than to compute, and on a busy machine threads wait for each other a
thousand times longer than they work.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

from forgetless.data import Scenario, Split, Task
from forgetless.methods import Method, method_calls
from forgetless.methods.state import state_tensors
from forgetless.subspace import Storage
from forgetless.subspace.storage import Footprint, budget_of, fitting_storage, is_shortage, shortage
from forgetless.support import signals
from forgetless.support.files import FolderLock
from forgetless.support.progress import advance, bar_on_terminal
from forgetless.support.provenance import versions
from forgetless.support.streams import global_stream
from forgetless.support.validation import (
    ConfigError,
    MemoryShortageError,
    TraceError,
    first_line,
    real,
    require,
    whole,
)
from forgetless.tangent import TangentFeatures
from forgetless.trace import (
    BEST_WITHIN,
    KEEPS,
    Keep,
    Trace,
    make_room,
    remove_unfinished,
    tasks_learned,
)
from forgetless.training.build import describe, make_learner, seed_groups, task_fingerprint
from forgetless.training.learner import Learner
from forgetless.training.models import ModelFactory, ModelOptions, ModelSource, make_model
from forgetless.training.network import Network
from forgetless.training.resume import LoadedCheckpoint, Position, Savepoint, Saver
from forgetless.training.sampling import batch_of
from forgetless.training.settings import Observer, Progress, Training

VARIABLE = "FORGETLESS_THREADS"
_WORK = 2e7  # multiply-adds for which a thread is worth its while: about a millisecond
_EIGEN = 20  # dense decompositions hand out a share of their n³ only

# Samples from whose features the memory of a run is estimated.
_FEW = 4


@final
class Threads:
    """Threads for each part of a run, at most as many as torch has when it is made.

    Arguments:
        device: where the run trains; on a GPU nothing is limited.
        given: a number for all parts; by default the environment's FORGETLESS_THREADS, or else by
            the amount of work.
    """

    def __init__(self, device: torch.device, given: int | None = None) -> None:
        text = os.environ.get(VARIABLE, "")
        name = "threads" if given is not None else VARIABLE
        number: Any = given if given is not None else int(text) if text.isdecimal() else text
        if number != "":
            whole(1).check(name, number)
        self._most = torch.get_num_threads()
        self._given = None if number == "" else int(number)
        self._limits = device.type == "cpu"
        self._counts: dict[str, int] = {}
        self._libraries = ThreadpoolController()  # SciPy has a BLAS of its own

    def plan(
        self, network: Network, method: Method[Any], scenario: Scenario, training: Training
    ) -> None:
        """Count the work of each part for a group of seeds."""
        if not self._limits:
            return
        samples = len(scenario.task(0, (0,)).train)
        demand = method.demand(samples)
        rows = demand.directions * (scenario.n_tasks - 1) if demand is not None else 0
        # A method that asks for the model does about as much again on samples of its own.
        gradients = 3 * network.work * training.batch_size * (4 if method.needs_model else 1)
        work = {
            "training": network.seeds * (gradients + 2 * rows * network.protected_size),
            "consolidation": demand.samples**3 / _EIGEN if demand is not None else gradients,
            "evaluation": network.seeds * network.work * samples,
        }
        self._counts = {part: max(1, int(w / _WORK)) for part, w in work.items()}

    def count(self, part: str = "") -> int:
        """The number of threads of a part; the least of all parts by default."""
        if not self._limits:
            return self._most
        return self._given or min(self._most, self._counts.get(part, 1))

    @contextmanager
    def use(self, part: str = "") -> Iterator[None]:
        """That number in the block, the previous one after it."""
        before, count = torch.get_num_threads(), self.count(part)
        if count != before:
            torch.set_num_threads(count)
        try:
            with self._libraries.limit(limits=count if self._limits else None, user_api="blas"):
                yield
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)


MakeLearner = Callable[[Sequence[int], Storage | None], Learner]


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
                        self._evaluate_within(t, tests)
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
            task = self.run.scenario.checked_task(t, self.learner.seeds)
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

    def _evaluate_within(self, t: int, tests: dict[int, Split]) -> None:
        """Note the best accuracy so far on every task, if an epoch with an evaluation has ended."""
        run, learner = self.run, self.learner
        every, progress = run.training.evaluate_every, learner.progress
        if not every or progress is None or progress.batches or progress.epochs % every:
            return
        best = run.trace.outcome.setdefault(BEST_WITHIN, {})
        for s in range(t + 1):
            accuracy = learner.accuracy(tests[s], run.scenario.competing(s, t)).tolist()
            for seed, value in zip(learner.seeds, accuracy, strict=True):
                tasks = best.setdefault(str(seed), [])
                tasks[s:] = [max([value, *tasks[s : s + 1]]), *tasks[s + 1 :]]

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
        epochs, tasks = run.training.epochs, run.scenario.n_tasks
        done = (self.group + (t + epoch / epochs) / tasks) / len(run.saver.groups)
        advance(f"task {t + 1} of {tasks}", done, 1)
        if run.observer is None:
            return
        measured = run.trace.accuracy[self._rows, t].tolist()
        run.observer(
            Progress(self.learner.seeds, t + 1, tasks, epoch, epochs, done, accuracy, measured)
        )


def fit(
    scenario: Scenario,
    method: Method[Any],
    model: ModelSource | None = None,
    *,
    seeds: int | Sequence[int] = 1,
    training: Training | None = None,
    device: str | torch.device = "auto",
    heads: Sequence[str] | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    keep: Keep = "all",
    checkpoint_every: float = 5.0,
    on_checkpoint: Callable[[], None] | None = None,
    observer: Observer | None = None,
    threads: int | None = None,
) -> Trace:
    """Train on the tasks of a scenario one after another and measure forgetting.

    Arguments:
        scenario: the tasks.
        method: the method against forgetting.
        model: a function that makes a fresh network (called once for each seed), or a network
            whose weights all seeds start from; by default an MLP with 100 hidden units.
        seeds: how many (0, 1, …), or which ones. A seed decides initial weights, batches, stored
            samples and pixel orders; its result does not depend on the others.
        training: epochs, batch size, learning rate, …
        device: "cpu", "cuda", …; "auto" uses a GPU if there is one.
        heads: where tasks have outputs of their own, beginnings of the names of the last layer's
            parameters, in whole parts ("fc1" is not of "fc10.weight"); by default "head", or else
            the last layer that has parameters.
        out: folder for the trace, written after every task; None keeps it in memory. An unfinished
            run with the same settings in it is resumed.
        overwrite: replace a trace in `out`; otherwise it is rejected.
        keep: "all" (weights after each task and the method's memory), "weights", or "nothing".
        checkpoint_every: minutes between checkpoints within a task, besides those after each task;
            0 for never.
        on_checkpoint: called when a checkpoint is written, to copy it elsewhere.
        observer: called with the progress; without one a run that takes long shows a bar on a
            terminal.
        threads: of torch on a CPU, which gets its own number back; by default what the environment
            variable FORGETLESS_THREADS says, or as few as the network is small.

    Returns:
        the complete trace. After an interruption the trace in `out` holds the finished tasks, and
        the same call resumes from the latest checkpoint, to the same result bit for bit.

    Example:
        >>> import forgetless
        >>> tasks = forgetless.scenario("rotated-digits", tasks=3, train_per_class=10)
        >>> trace = fit(tasks, forgetless.PCAOGD(components=20, samples=50), seeds=2)
        >>> trace.accuracy.shape  # seed, after task, on task
        (2, 3, 3)
    """
    _check_kinds(scenario, method, training)
    scenario.check()
    training = training or Training()
    try:
        chosen = tuple(map(index, seeds if isinstance(seeds, Iterable) else range(index(seeds))))
    except TypeError:
        raise ConfigError(
            f"seeds must be a count or a list of whole numbers, not {seeds!r}"
        ) from None
    distinct = bool(chosen) and len(set(chosen)) == len(chosen) and min(chosen) >= 0
    require(distinct, "seeds", seeds, "at least one, distinct, none negative")
    minutes = real(0).fits(checkpoint_every)
    require(minutes, "checkpoint_every", checkpoint_every, "a number of minutes, 0 for never")
    KEEPS.check("keep", keep)
    where = resolve_device(device)
    workers = Threads(where, threads)
    shape = (len(chosen), scenario.n_tasks, scenario.n_tasks)
    if model is None:
        model = ModelFactory(ModelOptions(), scenario.input_shape, scenario.n_outputs)
    module = make_model(model, chosen[0])
    described, fingerprint = describe(scenario, method, model, module, training, heads)
    trace = Trace(
        scenario=scenario.name,
        method=method.name,
        seeds=chosen,
        tasks=tuple(f"task {t + 1}" for t in range(scenario.n_tasks)),
        accuracy=np.full(shape, np.nan),
        config=described,
        fingerprint=fingerprint,
        versions=versions(where),
        timings=dict.fromkeys(("total", "training", "consolidation", "evaluation"), 0.0),
        path=None if out is None else Path(out),
    )
    groups = seed_groups(chosen, training, where, module)
    settings = {**trace.config, "seeds": chosen, "keep": keep}
    saver = Saver(trace, settings, checkpoint_every, on_checkpoint, groups)

    def make(seeds: Sequence[int], storage: Storage | None) -> Learner:
        return make_learner(scenario, method, model, seeds, training, heads, where, storage)

    with ExitStack() as stack:
        if observer is None:
            stack.enter_context(bar_on_terminal(method.label or method.name))
        if trace.path is not None:
            stack.enter_context(FolderLock(trace.path))
        if saver.active:
            stack.enter_context(signals.watched(signal.SIGINT))
            stack.enter_context(signals.deferred())
        stack.enter_context(workers.use())
        run = TrainingRun(scenario, training, trace, keep, saver, observer, make, workers)
        run.start(overwrite=overwrite)
    return trace


def _check_kinds(scenario: Any, method: Any, training: Any) -> None:
    """Reject names and classes given instead of objects."""
    tasks = isinstance(scenario, Scenario)
    require(tasks, "scenario", scenario, "a Scenario, such as scenario('rotated-digits')")
    made = isinstance(method, Method)
    accepted = "a method with its settings, such as SGD() or PCAOGD()"
    require(made, "method", method, accepted, method_calls())
    known = training is None or isinstance(training, Training)
    require(known, "training", training, "a Training, such as Training(epochs=5)")


def resolve_device(device: str | torch.device) -> torch.device:
    """A usable device; "auto" is a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.ones(1, device=resolved).item()
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise ConfigError(f"device {str(device)!r} cannot be used: {reason}") from error
    return resolved
