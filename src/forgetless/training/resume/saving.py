"""Checkpoints of a run: when one is due, what is in it, and whether one belongs to this run."""

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from forgetless.data import Split, Task
from forgetless.methods import Method, State
from forgetless.subspace import Storage
from forgetless.support import signals
from forgetless.support.errors import ForgetlessError, ForgetlessWarning, TraceError
from forgetless.trace import Trace, is_trace, load_trace
from forgetless.trace.checkpoint import CHECKPOINTS, Checkpoint, Store
from forgetless.training.learner import Learner
from forgetless.training.resume import snapshot

# After a task a checkpoint may take this share of the time since the one before it, or as many
# seconds. Tasks that go by faster than large ones can be written share one.
_LARGEST_SHARE = 0.1
_ALWAYS = 0.1
_RATE = 5e8  # bytes a second that the first one is thought to be written at
Parts = dict[str, dict[str, Tensor] | None]  # of a checkpoint; None for one that is as before
# What may differ between the process that wrote a checkpoint and the one that goes on from it, but
# not without a word: from there on results may differ in rounding.
_ENVIRONMENT = ("code", "torch", "numpy", "platform", "device")


@final
@dataclass(frozen=True)
class Position:
    """Where a run is: the group of seeds, its task, and whether that is remembered already."""

    group: int
    task: int
    consolidated: bool = False


@final
@dataclass(frozen=True)
class Saved:
    """A checkpoint that belongs to this run."""

    position: Position
    storage: Storage
    checkpoint: Checkpoint

    @property
    def has_learner(self) -> bool:
        """Whether a group of seeds was under way; otherwise the next one begins."""
        return "theta" in self.checkpoint.parts.get("progress", {})


@final
class Saver:
    """Writes the checkpoints of a run, and finds the one to go on from.

    Without a folder, with a method that cannot restore its memory, or with `every` 0 it does
    nothing.

    Arguments:
        trace: of the run; its accuracies and timings are part of a checkpoint.
        method: the method.
        settings: what must be the same in a run that goes on.
        every: minutes between checkpoints within a task.
        after: called when one is written.
        groups: of the run's seeds, that train together; None for all of them. A run that goes on
            keeps those with which it was begun, on whatever device that was.
    """

    def __init__(
        self,
        trace: Trace,
        method: Method[Any],
        settings: Mapping[str, Any],
        every: float,
        after: Callable[[], None] | None = None,
        groups: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self.trace = trace
        self.groups = [tuple(trace.seeds)] if groups is None else list(groups)
        self.seconds = 0.0
        self.active = (
            trace.path is not None and every > 0 and type(method).restore is not Method.restore
        )
        self._store = Store(trace.path / CHECKPOINTS) if trace.path is not None else None
        self._settings = json.loads(json.dumps(settings, default=str))
        self._every = 60 * every
        self._after = after
        self._data: list[str] = []
        self._initial = ""
        self._remembered: State | None = None  # whose tensors the latest memory part has
        self._written = time.monotonic()
        self._rate = _RATE

    def due(self) -> bool:
        """Whether to save before the next step: it is time, or a signal asks for the end."""
        if not self.active:
            return False
        return signals.pending() is not None or time.monotonic() - self._written >= self._every

    def begin(self, learner: Learner) -> None:
        """A group of seeds begins, with these weights."""
        self._data.clear()
        self._initial = fingerprint(learner.network.theta)
        self._remembered = None

    def mark_of(self, task: Task) -> str:
        """What tells a task's data from others', if anything asks for it."""
        return fingerprint(*_tensors(task.train), *_tensors(task.test)) if self.active else ""

    def see(self, index: int, found: str) -> None:
        """Note the mark of a task; it must be the one that the run was begun with."""
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
        """Save, unless the latest checkpoint is young for what this one would cost."""
        if not self.active:
            return
        parts = self._parts(learner)
        allowed = max(_ALWAYS, _LARGEST_SHARE * (time.monotonic() - self._written))
        if _bytes(parts) / self._rate <= allowed:
            self._save(position, learner, parts)

    def save(self, position: Position, learner: Learner | None) -> None:
        """Write a checkpoint; of a run between two groups of seeds there is no learner."""
        if self.active:
            self._save(position, learner, self._parts(learner))

    def _parts(self, learner: Learner | None) -> Parts:
        progress = {"accuracy": torch.from_numpy(self.trace.accuracy)}
        if learner is None:
            return {"progress": progress}
        # Within a task the memory stays as it is, and need not be written again.
        known = learner.state is self._remembered
        memory = None if known else snapshot.memory(learner)
        return {"progress": progress | snapshot.progress(learner), "memory": memory}

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
            "timings": self.trace.timings,
            "data": self._data,
            "initial": self._initial,
            "storage": None,
        }
        if learner is not None:
            body["storage"] = learner.storage.described()
            body["learner"] = snapshot.numbers(learner)
        self._store.write(body, parts)
        if self._after is not None:
            self._after()  # its time counts: who copies slowly copies more seldom
        self._remembered = None if learner is None else learner.state
        self._written = time.monotonic()
        cost = self._written - started
        # A small one tells nothing: what it takes is not its bytes.
        if cost > _ALWAYS:
            self._rate = _bytes(parts) / cost
        self.seconds += cost

    def load(self) -> Saved | None:
        """The checkpoint to go on from, None where there is none; refused if it is another run's.

        The trace gets the accuracies and timings that were saved.
        """
        if not self.active or self._store is None or self.trace.path is None:
            return None
        if is_trace(self.trace.path) and load_trace(self.trace.path).status == "complete":
            self.remove()  # it was stopped when all was done, before they were
            return None
        found = self._store.read()
        if found is None:
            return None
        where, body = self._store.folder, found.body
        try:
            difference = _difference(body["settings"], self._settings)
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
            saved = Saved(position, Storage.from_description(storage), found)
            accuracy = found.parts["progress"]["accuracy"].numpy()
            if accuracy.shape != self.trace.accuracy.shape:
                raise ValueError("an accuracy matrix of another shape")
            self.groups = groups
            self._data = [str(one) for one in body["data"]]
            self._initial = str(body["initial"])
            self.trace.tasks = tuple(map(str, body["tasks"]))
            self.trace.timings |= {str(n): float(s) for n, s in body["timings"].items()}
            np.copyto(self.trace.accuracy, accuracy)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise _misfit(where, error) from error
        return saved

    def restore(self, saved: Saved, learner: Learner) -> None:
        """Bring a learner that is made alike to where the run was stopped."""
        if self._store is None:
            return
        if fingerprint(learner.network.theta) != self._initial:
            raise TraceError(
                f"{self.trace.path} holds an unfinished run of another model: it began with other "
                "weights; choose another folder or overwrite it"
            )
        parts, body = saved.checkpoint.parts, saved.checkpoint.body
        try:
            snapshot.restore(learner, parts["progress"], parts.get("memory", {}), body["learner"])
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise _misfit(self._store.folder, error) from error
        self._remembered = learner.state

    def remove(self) -> None:
        """Remove all checkpoints: the run is finished, or begins anew."""
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


def fingerprint(*tensors: Tensor) -> str:
    """A checksum of tensors, their shapes and types."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(split: Split) -> list[Tensor]:
    every = (split.inputs, split.labels, split.orders)
    return [tensor for tensor in every if tensor is not None]


def _misfit(where: object, error: Exception) -> ForgetlessError:
    if isinstance(error, ForgetlessError):
        return error
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return TraceError(f"{where} does not fit this run: {type(error).__name__} {reason}")


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first settings that differ, in words; one that was not known there was not set."""
    flat_there, flat_here = _flat(there), _flat(here)
    differs = {n: flat_there.get(n) != flat_here.get(n) for n in {**flat_there, **flat_here}}
    names = [n for n in differs if differs[n] and (n in flat_there or flat_here[n])]
    pairs = ((n, *(ascii(of.get(n))[:60] for of in (flat_there, flat_here))) for n in names[:3])
    said = [f"{name} is {there_} there and {here_} here" for name, there_, here_ in pairs]
    return ", ".join(said) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, prefix if name == "config" else f"{name} ")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
