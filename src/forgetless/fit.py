"""Train a model on a sequence of tasks: scenario × model × method × seeds → trace."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import index
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from forgetless.data import Scenario, Split, Task
from forgetless.errors import ConfigError, require
from forgetless.learner import Learner
from forgetless.methods import Method
from forgetless.models import HEAD, ModelOptions, build_model
from forgetless.network import Network
from forgetless.provenance import versions
from forgetless.streams import global_stream
from forgetless.subspace import STORAGES
from forgetless.trace import Trace, make_room
from forgetless.training import Observer, Progress, Training

ModelSource = nn.Module | Callable[[], nn.Module]
Keep = Literal["all", "weights", "nothing"]


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
    config: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Trace:
    """Learn the tasks of a scenario one after another and measure what was forgotten.

    Arguments:
        scenario: the tasks.
        method: what is done against forgetting.
        model: a function that makes a fresh network (called once for each seed), or a network
            whose weights all seeds start from; by default an MLP with 100 hidden units.
        seeds: how many (0, 1, …), or which ones. A seed decides initial weights, batches, samples
            that are remembered and pixel orders; its result does not depend on the others.
        training: epochs, batch size, learning rate, …
        device: "cpu", "cuda", …; "auto" takes a GPU if there is one.
        heads: where tasks have outputs of their own, what the names of the last layer's parameters
            start with; by default "head", or else the last layer that has parameters.
        out: folder for the trace, written after every task; None keeps it in memory.
        overwrite: replace a trace that `out` holds already; otherwise it is refused.
        keep: "all" (weights after each task and the method's memory), "weights", or "nothing".
        config: settings to note in the trace instead of those given here.
        observer: called with the progress.

    Returns:
        the trace, complete. When interrupted, the trace in `out` holds what was finished.
    """
    training = training or Training()
    try:
        chosen = tuple(map(index, seeds if isinstance(seeds, Iterable) else range(index(seeds))))
    except TypeError:
        raise ConfigError(
            f"seeds must be a count or a list of whole numbers, not {seeds!r}"
        ) from None
    distinct = bool(chosen) and len(set(chosen)) == len(chosen) and min(chosen) >= 0
    require(distinct, "seeds", seeds, "at least one, distinct, none negative")
    require(keep in ("all", "weights", "nothing"), "keep", keep, "all, weights or nothing")
    where = resolve_device(device)
    shape = (len(chosen), scenario.n_tasks, scenario.n_tasks)
    trace = Trace(
        scenario=scenario.name,
        method=method.name,
        seeds=chosen,
        tasks=tuple(f"task {t + 1}" for t in range(scenario.n_tasks)),
        accuracy=np.full(shape, np.nan),
        config=dict(config) if config is not None else _describe(method, training),
        versions=versions(where),
        timings=dict.fromkeys(("total", "training", "consolidation", "evaluation"), 0.0),
        path=None if out is None else Path(out),
    )
    groups = _groups(chosen, training, where, _make_model(model, scenario, chosen[0]))
    try:
        for number, group in enumerate(groups):
            learner = make_learner(scenario, method, model, group, training, heads, where)
            if number == 0 and trace.path is not None:
                make_room(trace.path, overwrite=overwrite)
            place = number, len(groups), observer or (lambda progress: None)
            run = _Run(scenario, learner, training, trace, keep, *place)
            with global_stream(group[0], "training"):
                run.learn_all()
        trace.status = "complete"
        trace.save_record()
    except BaseException as error:
        trace.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        if np.isfinite(trace.accuracy).any():
            trace.save_record()
        raise
    return trace


def _groups(
    seeds: tuple[int, ...], training: Training, device: torch.device, module: nn.Module
) -> list[tuple[int, ...]]:
    """The seeds that train together in one batched program."""
    together = training.seeds_together or (len(seeds) if device.type == "cuda" else 1)
    # What dropout draws for a seed would depend on the seeds beside it.
    if any(isinstance(m, _DropoutNd) for m in module.modules()):
        together = 1
    return [seeds[i : i + together] for i in range(0, len(seeds), together)]


@final
@dataclass(frozen=True)
class _Run:
    """One group of seeds on its way through the tasks, and the trace that it fills."""

    scenario: Scenario
    learner: Learner
    training: Training
    trace: Trace
    keep: Keep
    group: int
    groups: int
    observer: Observer

    def learn_all(self) -> None:
        network = self.learner.network
        dtype, device = network.theta.dtype, network.theta.device
        tests: dict[int, Split] = {}
        for t, task in enumerate(self._tasks(ahead=device.type != "cpu")):
            train = task.train.to(device, dtype)
            tests[t] = task.test.to(device, dtype)
            with self._timed("training"):
                for epoch in self.learner.train(train, t, self.training.epochs):
                    self._report(t, epoch, self._mean_accuracy(t - 1))
            # What would be remembered of the last task is of use only to those who read it.
            if t + 1 < self.scenario.n_tasks or self.keep == "all":
                with self._timed("consolidation"):
                    self.learner.consolidate(train, t)
            with self._timed("evaluation"):
                self._evaluate(t, tests)
            self._record(t, task.name)
            self._report(t, self.training.epochs, self._mean_accuracy(t))

    def _tasks(self, *, ahead: bool) -> Iterator[Task]:
        """The tasks in their order; with `ahead` the next one is made while one is learned."""
        with ThreadPoolExecutor(1) as pool:
            coming = None
            for t in range(self.scenario.n_tasks):
                task = coming.result() if coming else self.scenario.task(t, self.learner.seeds)
                if ahead and t + 1 < self.scenario.n_tasks:
                    coming = pool.submit(self.scenario.task, t + 1, self.learner.seeds)
                yield task

    def _evaluate(self, t: int, tests: dict[int, Split]) -> None:
        if self.training.evaluate == "all" and t == 0:
            theta = self.learner.network.theta
            for later in range(1, self.scenario.n_tasks):
                test = self.scenario.task(later, self.learner.seeds).test
                tests[later] = test.to(theta.device, theta.dtype)
        for s, test in tests.items():
            accuracy = self.learner.accuracy(test, self.scenario.classes(s))
            self.trace.accuracy[self._rows(), t, s] = accuracy.numpy()

    def _record(self, t: int, name: str) -> None:
        """Note the task in the trace, on disk if it has a folder."""
        learner, trace = self.learner, self.trace
        trace.tasks = (*trace.tasks[:t], name, *trace.tasks[t + 1 :])
        last = t == self.scenario.n_tasks - 1
        for row, seed in enumerate(learner.seeds):
            if self.keep != "nothing":
                trace.keep_weights(seed, t, learner.network.state_dict(row))
            if self.keep == "all" and last:
                seen = learner.method.remembers_everything  # and is in the dataset already
                trace.keep_memory(seed, {} if seen else learner.state.tensors(row))
        trace.save_record()

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
            if self.learner.network.theta.is_cuda:
                torch.cuda.synchronize()
        finally:
            seconds = time.perf_counter() - started
            self.trace.timings[part] += seconds
            self.trace.timings["total"] += seconds

    def _rows(self) -> list[int]:
        return [self.trace.seeds.index(seed) for seed in self.learner.seeds]

    def _mean_accuracy(self, t: int) -> float | None:
        return float(self.trace.accuracy[self._rows(), t, : t + 1].mean()) if t >= 0 else None

    def _report(self, t: int, epoch: int, accuracy: float | None) -> None:
        epochs, tasks = self.training.epochs, self.scenario.n_tasks
        done = (self.group + (t + epoch / epochs) / tasks) / self.groups
        place = self.learner.seeds, t + 1, tasks, epoch, epochs, done, accuracy
        self.observer(Progress(*place, self.trace.accuracy[self._rows(), t].tolist()))


def make_learner(
    scenario: Scenario,
    method: Method[Any],
    model: ModelSource | None,
    seeds: Sequence[int],
    training: Training,
    heads: Sequence[str] | None,
    device: torch.device,
) -> Learner:
    """Networks for a group of seeds, checked against the scenario, and their learner."""
    modules = [_make_model(model, scenario, seed) for seed in seeds]
    frozen = tuple(part.strip() for part in training.freeze.split(",") if part.strip())
    heads = (heads,) if isinstance(heads, str) else heads
    free = tuple(heads) if heads is not None else _last_layer(modules[0])
    for argument, prefixes in (("freeze", frozen), ("heads", free)):
        for prefix in prefixes:
            known = any(n.startswith(prefix) for n, _ in modules[0].named_parameters())
            require(known, argument, prefix, "the beginning of a parameter's name in the model")
    has_heads = scenario.has_heads and not method.reaches_heads
    active = torch.zeros(scenario.n_tasks, scenario.n_outputs, dtype=torch.bool)
    for t in range(scenario.n_tasks):
        active[t, scenario.classes(t)] = True
    network = Network(
        modules,
        active,
        is_free=lambda name: has_heads and name.startswith(free),
        is_frozen=lambda name: name.startswith(frozen),
        device=device,
        dtype=getattr(torch, training.dtype),
    )
    first = scenario.task(0, seeds).train
    few = torch.arange(min(2, len(first))).expand(len(seeds), -1)
    network.check_outputs(first.take(few)[0].to(network.theta))
    return Learner(
        network,
        method,
        scenario,
        seeds,
        batch_size=training.batch_size,
        lr=training.lr,
        eval_mode_after=training.eval_mode_after,
        storage=STORAGES[training.storage],
    )


def _make_model(model: ModelSource | None, scenario: Scenario, seed: int) -> nn.Module:
    with global_stream(seed, "initial weights"):
        try:
            if model is None:
                made = build_model(ModelOptions(), scenario.input_shape, scenario.n_outputs)
            else:
                made = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        except (RuntimeError, MemoryError) as error:
            reason = str(error).splitlines()[0] if str(error) else "not enough memory"
            raise ConfigError(f"the model cannot be made: {reason}") from error
    require(
        isinstance(made, nn.Module), "model", made, "a torch.nn.Module or a function making one"
    )
    return made


def _last_layer(module: nn.Module) -> tuple[str, ...]:
    """What the names of the last layer's parameters start with."""
    names = [name for name, _ in module.named_parameters()]
    if any(name.startswith(f"{HEAD}.") for name in names):
        return (f"{HEAD}.",)
    return (names[-1][: names[-1].rfind(".") + 1] or names[-1],) if names else ()


def _describe(method: Method[Any], training: Training) -> dict[str, Any]:
    hyperparameters: dict[str, Any] = asdict(method)  # type: ignore[call-overload]
    return {"method": hyperparameters, "training": asdict(training)}


def resolve_device(device: str | torch.device) -> torch.device:
    """A usable device; "auto" is a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.ones(1, device=resolved).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].strip()
        raise ConfigError(f"device {str(device)!r} cannot be used: {reason}") from error
    return resolved
