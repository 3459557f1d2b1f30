"""Resume an interrupted run exactly where it stopped: what is saved, when, and how it returns."""

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from forgetless.data import Split, Task
from forgetless.methods import Samples
from forgetless.methods.state import check_unchanged, restored_state, state_marks, state_tensors
from forgetless.subspace import Storage
from forgetless.support import signals
from forgetless.support.provenance import digest_of
from forgetless.support.validation import ForgetlessError, ForgetlessWarning, TraceError, first_line
from forgetless.trace import Trace, is_complete, is_trace, load_trace
from forgetless.trace.checkpoint import CHECKPOINTS, Checkpoint, Store
from forgetless.trace.experiment import changed_parts, changed_settings
from forgetless.training.learner import HeldOut, Learner, TaskProgress
from forgetless.training.optimizers import TorchOptimizer

# After a task a checkpoint may take this share of the time since the one before it, or so many
# seconds. Short tasks share one.
_LARGEST_SHARE = 0.1
_ALWAYS = 0.1
_RATE = 5e8  # bytes a second, assumed for the first one
_NEVER: Any = object()  # sentinel: no state has been saved yet (None is a valid state)
# May differ between the process that wrote a checkpoint and the one that resumes from it, with a
# warning: from there on results may differ in rounding.
_ENVIRONMENT = ("code", "torch", "numpy", "platform", "device")


def learner_progress(learner: Learner) -> dict[str, Tensor]:
    """Weights, buffers, generators and their latest draws: all but the method's state."""
    theta, done = learner.network.theta, learner.progress
    found = {"theta": theta, "choices": learner.sampler.coming, **_random(learner)}
    found |= {f"fixed.{name}": t for name, t in learner.network.fixed.items()}
    if learner.optimizer is not None:
        found |= {f"optimizer.{name}": t for name, t in learner.optimizer.tensors().items()}
    if done is not None:
        found |= {} if done.order is None else {"order": done.order}
        found |= {f"best.{name}": t for name, t in done.held_out.best.items()}
    if learner.followed is not None:
        for row in range(len(learner.seeds)):
            of_seed = learner.followed.tensors(row).items()
            found |= {f"followed.{row}.{name}": t for name, t in of_seed}
    return found


def learner_state(learner: Learner) -> dict[str, Tensor]:
    """The tensors of the method's state, of every seed."""
    rows = range(len(learner.seeds))
    return {f"{row}.{n}": t for row in rows for n, t in state_tensors(learner.state, row).items()}


def learner_numbers(learner: Learner) -> dict[str, Any]:
    """Counters, as plain values."""
    progress = learner.progress or TaskProgress(learner.steps)
    return {
        "steps": learner.steps,
        "first_step": progress.first_step,
        "epochs": progress.epochs,
        "batches": progress.batches,
        "asked": learner.sampler.asked,
        "held_out": progress.held_out.numbers(),
    }


def restore_learner(
    learner: Learner,
    tensors: Mapping[str, Tensor],
    remembered: Mapping[str, Tensor],
    values: Mapping[str, Any],
) -> None:
    """Bring a learner made alike to where `progress`, `state` and `numbers` were taken."""
    network = learner.network
    theta = network.theta
    if tensors["theta"].shape != theta.shape:
        raise ValueError(f"weights of shape {tuple(tensors['theta'].shape)}")
    # Copied in place: at another alignment in memory products may round differently.
    theta.copy_(tensors["theta"])
    for name, value in network.fixed.items():
        value.copy_(tensors[f"fixed.{name}"])
    of_seeds = [
        {n.removeprefix(f"{row}."): t for n, t in remembered.items() if n.startswith(f"{row}.")}
        for row in range(len(learner.seeds))
    ]

    def load(samples: Sequence[Mapping[str, Tensor]]) -> Samples:
        return Samples.restore(
            [{n: t.to(theta.device) for n, t in kept.items()} for kept in samples]
        )

    rows = range(len(learner.seeds))
    followed = [_starting_with(f"followed.{row}.", tensors) for row in rows]
    learner.followed = load(followed) if followed[0] else None
    storage = learner.view.storage
    learner.state = restored_state(of_seeds, learner.method, network.protected, storage, load)
    learner.steps = int(values["steps"])
    order = tensors["order"].to(theta.device) if "order" in tensors else None
    first, epochs, batches = (int(values[name]) for name in ("first_step", "epochs", "batches"))
    held_out = HeldOut(_starting_with("best.", tensors), **values["held_out"])
    learner.progress = TaskProgress(first, epochs, batches, order, held_out)
    learner.optimizer = learner.new_optimizer()
    if learner.optimizer is not None:
        learner.optimizer.restore(_starting_with("optimizer.", tensors))
    learner.sampler.asked = [(int(count), int(available)) for count, available in values["asked"]]
    learner.sampler.coming = tensors["choices"].to(theta.device)
    _set_random(learner, tensors)


@final
@dataclass(frozen=True)
class Savepoint:
    """All that a consolidation changes: the method's state, progress, optimizer, generators."""

    state: Any
    progress: TaskProgress | None
    optimizer: TorchOptimizer | None
    followed: Samples | None
    random: dict[str, Tensor]

    @classmethod
    def of(cls, learner: Learner) -> "Savepoint":
        """The learner as it is now."""
        now = learner.state, learner.progress, learner.optimizer, learner.followed
        return cls(*now, _random(learner))

    def restore(self, learner: Learner) -> None:
        """Undo a consolidation."""
        learner.state, learner.progress = self.state, self.progress
        learner.optimizer, learner.followed = self.optimizer, self.followed
        _set_random(learner, self.random)


def _random(learner: Learner) -> dict[str, Tensor]:
    """States of the seeds' generators, (4 S, bytes), and of torch's own, which dropout uses."""
    own = torch.stack([generator.get_state() for generator in learner.generators()])
    states = {"generators": own, "global": torch.get_rng_state()}
    theta = learner.network.theta
    if theta.is_cuda:
        states["global.cuda"] = torch.cuda.get_rng_state(theta.device)
    return states


def _set_random(learner: Learner, states: Mapping[str, Tensor]) -> None:
    for generator, state in zip(learner.generators(), states["generators"], strict=True):
        generator.set_state(state.clone())
    torch.set_rng_state(states["global"])
    theta = learner.network.theta
    if theta.is_cuda and "global.cuda" in states:
        torch.cuda.set_rng_state(states["global.cuda"], theta.device)


def _starting_with(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


Parts = dict[str, dict[str, Tensor] | None]  # of a checkpoint; None for an unchanged one


@final
@dataclass(frozen=True)
class Position:
    """Where a run is: the group of seeds, its task, and whether that is consolidated."""

    group: int
    task: int
    consolidated: bool = False


@final
@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that belongs to this run."""

    position: Position
    storage: Storage
    checkpoint: Checkpoint

    @property
    def has_learner(self) -> bool:
        """Whether a group of seeds had begun; otherwise the next one begins."""
        return "theta" in self.checkpoint.parts.get("progress", {})


@final
class Saver:
    """Writes the checkpoints of a run, and finds the one to resume from.

    It does nothing without a folder, or with `every` 0.

    Arguments:
        trace: of the run; its accuracies and timings are part of a checkpoint.
        settings: must be the same in a run that resumes.
        every: minutes between checkpoints within a task.
        after: called when one is written.
        groups: the run's seeds that train together; None for all of them. A resumed run keeps the
            groups that it began with, on whatever device that was.
    """

    def __init__(
        self,
        trace: Trace,
        settings: Mapping[str, Any],
        every: float,
        after: Callable[[], None] | None = None,
        groups: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self.trace = trace
        self.groups = [tuple(trace.seeds)] if groups is None else list(groups)
        self.seconds = 0.0
        self.active = trace.path is not None and every > 0
        self._store = Store(trace.path / CHECKPOINTS) if trace.path is not None else None
        self._settings = json.loads(json.dumps(settings, default=str))
        self._every = 60 * every
        self._after = after
        self._data: list[str] = []  # checksums by task
        self._initial = ""
        self._saved_state: Any = _NEVER  # the one in the latest memory part
        self._marks: list[object] = []  # of that state
        self._written = time.monotonic()
        self._rate = _RATE

    def due(self) -> bool:
        """Whether to save before the next step: it is time, or a signal asks for the end."""
        if not self.active:
            return False
        return signals.pending() is not None or time.monotonic() - self._written >= self._every

    def begin(self, learner: Learner) -> None:
        """Start a group of seeds: note its initial weights, and forget the last group's data."""
        self._data.clear()
        self._initial = digest_of(learner.network.theta)
        self._saved_state = _NEVER

    def checksum(self, task: Task) -> str:
        """A checksum of a task's data, if checkpoints are written."""
        return digest_of(*_tensors(task.train), *_tensors(task.test)) if self.active else ""

    def check_data(self, index: int, found: str) -> None:
        """Note the checksum of a task, and reject another one than the run began with."""
        if not self.active:
            return
        if index == len(self._data):
            self._data.append(found)
        if self._data[index] != found:
            raise TraceError(
                f"{self.trace.path} holds a run on other data: those of task {index + 1} have "
                "changed; choose another folder or overwrite it"
            )

    def save_after_task(self, position: Position, learner: Learner | None) -> None:
        """Save, unless the latest checkpoint is recent for the cost of this one."""
        if not self.active:
            return
        parts = self._parts(learner)
        allowed = max(_ALWAYS, _LARGEST_SHARE * (time.monotonic() - self._written))
        if _bytes(parts) / self._rate <= allowed:
            self._save(position, learner, parts)

    def save(self, position: Position, learner: Learner | None) -> None:
        """Write a checkpoint; between two groups of seeds there is no learner."""
        if self.active:
            self._save(position, learner, self._parts(learner))

    def _parts(self, learner: Learner | None) -> Parts:
        progress = {"accuracy": torch.from_numpy(self.trace.accuracy)}
        if learner is None:
            return {"progress": progress}
        # A state that `update` returns as it was need not be written again.
        known = learner.state is self._saved_state
        if known:
            check_unchanged(learner.method, "update", learner.state, self._marks)
        state = None if known else learner_state(learner)
        return {"progress": progress | learner_progress(learner), "memory": state}

    def _save(self, position: Position, learner: Learner | None, parts: Parts) -> None:
        if self._store is None:
            return
        started = time.monotonic()
        body: dict[str, Any] = {
            "settings": self._settings,
            "versions": self.trace.versions,
            "position": asdict(position),
            "groups": self.groups,
            "tasks": self.trace.tasks,
            "fingerprint": self.trace.fingerprint,
            "outcome": self.trace.outcome,
            "timings": self.trace.timings,
            "data": self._data,
            "initial": self._initial,
            "storage": None,
        }
        if learner is not None:
            body["storage"] = learner.view.storage.described()
            body["learner"] = learner_numbers(learner)
        self._store.write(body, parts)
        if self._after is not None:
            self._after()  # its time counts: a slow copy is made less often
        self._note(learner)
        self._written = time.monotonic()
        cost = self._written - started
        # A small one tells nothing: its cost is not in its bytes.
        if cost > _ALWAYS:
            self._rate = _bytes(parts) / cost
        self.seconds += cost

    def load(self) -> LoadedCheckpoint | None:
        """The checkpoint to resume from, None if there is none; another run's is rejected.

        The trace gets the saved accuracies and timings.
        """
        if not self.active or self._store is None or self.trace.path is None:
            return None
        if is_trace(self.trace.path) and is_complete(load_trace(self.trace.path)):
            self.remove()  # it was stopped between completing the trace and this
            return None
        found = self._store.read()
        if found is None:
            return None
        where, body = self._store.folder, found.body
        try:
            begun = replace(self.trace, fingerprint=dict(body["fingerprint"]))
            difference = changed_settings(body["settings"], self._settings) or ", ".join(
                f"{words} changed" for words in changed_parts(begun, self.trace)
            )
            if difference:
                raise TraceError(
                    f"{self.trace.path} holds an unfinished run with other settings: {difference}; "
                    "choose another folder, the same settings, or overwrite it"
                )
            self._warn_of_environment(body["versions"])
            position = Position(**body["position"])
            groups = [tuple(map(int, group)) for group in body.get("groups", self.groups)]
            if tuple(chain(*groups)) != tuple(self.trace.seeds) or position.group >= len(groups):
                raise ValueError("groups of other seeds")
            storage = body["storage"] or Storage().described()
            loaded = LoadedCheckpoint(position, Storage.from_description(storage), found)
            accuracy = found.parts["progress"]["accuracy"].numpy()
            if accuracy.shape != self.trace.accuracy.shape:
                raise ValueError("an accuracy matrix of another shape")
            self.groups = groups
            self._data = [str(one) for one in body["data"]]
            self._initial = str(body["initial"])
            self.trace.tasks = tuple(map(str, body["tasks"]))
            self.trace.fingerprint = begun.fingerprint
            self.trace.outcome = dict(body["outcome"])
            self.trace.timings |= {str(n): float(s) for n, s in body["timings"].items()}
            np.copyto(self.trace.accuracy, accuracy)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise _misfit(where, error) from error
        return loaded

    def restore(self, loaded: LoadedCheckpoint, learner: Learner) -> None:
        """Bring a learner made alike to where the run was stopped."""
        if self._store is None:
            return
        if digest_of(learner.network.theta) != self._initial:
            raise TraceError(
                f"{self.trace.path} holds an unfinished run of another model: it began with other "
                "weights; choose another folder or overwrite it"
            )
        parts, body = loaded.checkpoint.parts, loaded.checkpoint.body
        try:
            restore_learner(learner, parts["progress"], parts.get("memory", {}), body["learner"])
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise _misfit(self._store.folder, error) from error
        self._note(learner)

    def _note(self, learner: Learner | None) -> None:
        """Note that the latest checkpoint holds the state of this learner."""
        self._saved_state = _NEVER if learner is None else learner.state
        self._marks = [] if learner is None else state_marks(learner.state)

    def remove(self) -> None:
        """Remove all checkpoints: the run is finished or starts again."""
        if self._store is not None:
            self._store.remove()

    def _warn_of_environment(self, before: Mapping[str, Any]) -> None:
        now = self.trace.versions
        changed = [f"{n} {before.get(n)}" for n in _ENVIRONMENT if before.get(n) != now.get(n)]
        if changed:
            warnings.warn(
                f"{self.trace.path} was begun with {', '.join(changed)}; from here on its results "
                "may differ in rounding from those of an uninterrupted run",
                ForgetlessWarning,
                stacklevel=2,
            )


def _bytes(parts: Parts) -> int:
    return sum(t.nbytes for part in parts.values() if part for t in part.values())


def _tensors(split: Split) -> list[Tensor]:
    every = (split.inputs, split.labels, split.orders, split.origins)
    return [tensor for tensor in every if tensor is not None]


def _misfit(where: object, error: Exception) -> ForgetlessError:
    if isinstance(error, ForgetlessError):
        return error
    reason = first_line(error)[:200]
    return TraceError(f"{where} does not fit this run: {type(error).__name__} {reason}")
