"""Drift: how far the outputs on stored tasks have moved, on a few samples kept of each."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from forgetless.guard.batches.loading import Reservoir, TaskData
from forgetless.guard.batches.outputs import compared_outputs
from forgetless.guard.batches.samples import Part, StoredSamples
from forgetless.guard.distributed.loading import SharedTaskData
from forgetless.guard.distributed.sharding import reshard
from forgetless.guard.model import GuardedModel, full_precision
from forgetless.guard.parameters import has_moving_statistics
from forgetless.methods import Method
from forgetless.methods.base import is_look
from forgetless.support.streams import stream, undisturbed
from forgetless.support.validation import ConfigError, DataError, NoSamplesError
from forgetless.tangent import eval_mode

_FIRST = 100  # steps for each stored task until the first check; then after twice as many each time
_LIMIT = 0.3  # drift from which a task may be forgotten; outputs move far also to get better
# Where there are classes, accuracy has fallen by some 15 points with either of these.
_RISE = 0.2  # of the loss
_CHANGED = 0.25  # share of predictions
# A task is learned poorly if its loss has come less near to zero, from that of a constant answer,
# than this share of what earlier ones had; if so much of its progress was removed, that is why.
_LEARNED = 0.8
_BLOCKED = 0.8
_PULLED = 1.0  # the same of a penalty: its gradient, in lengths of the loss's
_KNOWN = 0.1  # that earlier ones must have had at least
_ENOUGH = 100  # steps; at the first ones a penalty has nothing to pull back
_FAR = 100  # a larger drift is not told in percent
_LITTLE = 0.01  # share of the steps removed, or length that is added, that hardly protects
_WIDTH = 1024  # outputs kept of a sample that has more
_SEQUENCES = 4  # that are run together, since their logits can be large


@final
@dataclass(frozen=True)
class TaskDrift:
    """How far the outputs on a stored task have moved since it was stored.

    With z_i the kept samples' outputs then and z'_i now,

        drift = Σ_i ‖z'_i − z_i‖² / Σ_i ‖z_i − z̄‖²:

    at 1 the outputs have moved as far as those of different samples lie apart. Outputs are the
    logits of a classifier, less their mean over classes; the log-likelihood of each label of a
    sequence, every label a sample of its own; the numbers that a regression or the function
    `output=` gives.

    Arguments:
        task: its number, from 1.
        samples: how many are kept.
        drift: as above; NaN where outputs are no longer finite.
        changed: share of the samples (of a sequence's labels) whose predicted class changed; None
            without classes.
        loss_then: mean loss on the samples when the task was stored; None without a loss.
        loss: the same now.
    """

    task: int
    samples: int
    drift: float
    changed: float | None
    loss_then: float | None
    loss: float | None

    @property
    def is_forgotten(self) -> bool:
        """Whether the outputs have moved far and for the worse, or are outvoted by new ones."""
        least = 0.0 if self.changed is None else _RISE
        if self.loss is not None and self.loss_then is not None and self.loss < self.loss_then:
            return False
        if self.loss is None or self.loss_then is None:
            rose = self.changed is None  # nothing else tells whether they moved for the worse
        else:
            rose = not self.loss <= self.loss_then + least
        changed = (self.changed or 0.0) >= _CHANGED
        # The outputs of a head that has grown may be outvoted by new ones without moving.
        outvoted = changed and rose
        return outvoted or (not self.drift <= _LIMIT and (rose or changed))

    @property
    def level(self) -> float:
        """The mean loss, or the drift where there are no classes or no loss."""
        return self.drift if self.loss is None or self.changed is None else self.loss

    @property
    def level_then(self) -> float:
        """The level when the task was stored."""
        return 0.0 if self.loss_then is None or self.changed is None else self.loss_then

    def __str__(self) -> str:
        text = f"task {self.task}: drift {self.drift:.3g}"
        if self.changed is not None:
            text += f", {self.changed:.0%} of predictions changed"
        if self.loss is not None:
            text += f", loss {self.loss_then:.3g} → {self.loss:.3g}"
        return f"{text} ({self.samples} samples)"


@final
@dataclass(frozen=True)
class Score:
    """How good a model is on samples.

    Arguments:
        samples: how many.
        accuracy: share of them whose class is right; None where there are no classes.
        loss: mean loss; None where there is none.
    """

    samples: int
    accuracy: float | None
    loss: float | None


@final
@dataclass(frozen=True)
class Drift:
    """How far the outputs on the stored tasks have moved, task by task.

    Arguments:
        steps: taken since the latest task was stored.
        tasks: one entry for each task with samples to measure it on.
    """

    steps: int
    tasks: tuple[TaskDrift, ...]

    def metrics(self) -> dict[str, float]:
        """Every number by name, such as "drift/task 1"."""
        return {
            f"{name}/task {task.task}": value
            for task in self.tasks
            for name, value in (
                ("drift", task.drift),
                ("changed", task.changed),
                ("loss", task.loss),
            )
            if value is not None
        }

    def __str__(self) -> str:
        return "\n".join([f"after {self.steps} steps", *map(str, self.tasks)])


@final
class DriftCheck:
    """Keeps a few samples of each task with the outputs on them, and measures how these move.

    Nothing else notices: not the model's mode and buffers, nor any random generator. A model that
    is sharded runs in all processes for it, so it is measured when a task ends or is asked for.

    Arguments:
        model: the model.
        method: the method, which has the advice that warnings give.
        samples: kept of each task; 0 keeps none.
        seed: of their choice.
        warn: takes a warning.
    """

    def __init__(
        self,
        model: GuardedModel,
        method: Method[Any],
        samples: int,
        seed: int,
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self.samples = samples
        self.latest: Drift | None = None
        self.model = model
        self._method = method
        self._seed = seed
        self._warned = self._failed = self._hindered = self._was_forgotten = False
        self.start({}, 0)

    def start(self, kept: Mapping[int, StoredSamples], steps: int) -> None:
        """Measure on these samples from now on.

        Arguments:
            kept: task, from 1 → its samples, with the outputs on them attached.
            steps: taken so far.
        """
        self.kept = kept
        self._start = steps
        self._next = _FIRST * len(kept)

    def reservoir(self, task: int) -> Reservoir:
        """Where to set samples of a task aside."""
        return Reservoir(self.samples, stream(self._seed, "drift samples", task))

    def keep(
        self, kept: Mapping[int, StoredSamples], task: int, data: TaskData | SharedTaskData
    ) -> Mapping[int, StoredSamples]:
        """The kept samples of all tasks, with those set aside of a new one; or a warning."""
        if not self.samples or task in kept:
            return kept
        try:
            with _unnoticed(self.model) as model:
                parts = [part.mapped(Tensor.cpu) for part in data.set_aside().parts]
                parts = [replace(part, extra=_outputs(model, part)) for part in parts]
        except (ConfigError, DataError) as error:
            self._warn(
                f"the drift of task {task} cannot be checked: {error} (drift_samples=0 does "
                "without the check)"
            )
            return kept
        return {**kept, task: StoredSamples(tuple(parts))}

    def is_due(self, steps: int) -> bool:
        """Whether to measure after this step: more and more seldom, so that it costs little."""
        due = bool(self.kept) and steps - self._start >= self._next
        if not due or self.model.parameters.slices is not None:
            return False
        self._next *= 2
        return True

    def measure(self, steps: int, theta: Tensor | None = None) -> Drift:
        """The drift after so many steps; every process calls it.

        Arguments:
            steps: how many.
            theta: the weights, (1, p); None for the present ones.
        """
        if not self.kept:
            return Drift(steps - self._start, ())
        with _unnoticed(self.model) as model:
            rows = tuple(_compared(task, kept, model, theta) for task, kept in self.kept.items())
        return Drift(steps - self._start, rows)

    def measured(self, steps: int) -> Drift | None:
        """The same at the present weights, None with a warning where a model no longer runs."""
        with self._once():
            return self.measure(steps)
        return None

    def adapted(self, state: Any, steps: int) -> Any:
        """The method's state, with a look at how well the tasks are kept if it is time for one.

        What else moves the outputs, as the statistics of batch norm do, counts at both weights. Of
        a sharded model, which has no weights but its own, it is compared with what was stored.
        """
        if not self._method.adapts or self._failed or not is_look(steps, len(self.kept)):
            return state

        def harm(theta: Tensor) -> Tensor:
            if self.model.parameters.slices is None:
                now, then = (self.measure(steps, at).tasks for at in (None, theta))
                found = [a.level - b.level for a, b in zip(now, then, strict=True)]
            else:
                with _unnoticed(self.model) as model:
                    now = tuple(_compared(k, some, model, None) for k, some in self.kept.items())
                found = [a.level - a.level_then for a in now]
            rise = torch.tensor([found])
            return rise if self.model.ranks is None else self.model.ranks.broadcast(rise)

        with self._once():
            return self._method.adapted(state, harm)
        return state

    @contextmanager
    def _once(self) -> Iterator[None]:
        """Warn, once, where a model no longer takes what it took."""
        try:
            yield
        except (ConfigError, DataError) as error:
            if not self._failed:
                self._failed = True
                self._warn(f"the drift cannot be checked any more: {error}")

    def report(
        self,
        drift: Drift | None,
        removed: float | None,
        pull: float | None = None,
        *,
        ends: bool = False,
        steps: int = 0,
    ) -> None:
        """Remember what was measured, and warn, once, if a task that is protected is forgotten.

        A method that adapts may win a task back, and has until the next check for that.

        Arguments:
            drift: as measured, if it could be.
            removed: share of the steps that was removed; None if none was projected.
            pull: what was added to the gradients, in lengths of them; None for projections.
            ends: whether the present task ends.
            steps: of it.
        """
        if not self.samples and ends:
            self._warn_of_little(removed, pull if steps >= _ENOUGH else None)
        if drift is None or not drift.tasks:
            return
        self.latest = drift
        forgotten = [task for task in drift.tasks if task.is_forgotten]
        waits = self._method.adapts and not self._was_forgotten and not ends
        self._was_forgotten = bool(forgotten)
        if forgotten and self._method.protects and not waits and not self._warned:
            self._warned = True
            worst = max(forgotten, key=lambda t: math.inf if math.isnan(t.drift) else t.drift)
            self._warn(self._warning(worst, removed))

    def _warn_of_little(self, removed: float | None, pull: float | None) -> None:
        """Warn, once, that a method changes about nothing, where no drift tells if it should."""
        what = ""
        if self._method.keeps_directions and removed is not None and removed < _LITTLE:
            what = f"only {removed:.1%} of the steps was removed"
        if self._method.protects and pull is not None and pull < _LITTLE:
            what = f"what is added to the gradients is only {pull:.1%} as long as they are"
        if what and not self._warned:
            self._warned = True
            more = self._method.advice(more=True)
            self._warn(
                f"{what}, so the earlier tasks are protected "
                "little, unless the new one does not touch them: check them on data, or let the "
                f"guard do so (drift_samples){f'; {more} to protect more' if more else ''}"
            )

    def report_learning(self, task: int, blocked: float | None, pull: float | None = None) -> None:
        """Warn, once, if a task was stored that the method has kept from being learned.

        Arguments:
            task: its number, from 1.
            blocked: share of its progress that was removed, if that is known.
            pull: what was added to the gradients, in lengths of them, by a penalty.
        """
        if blocked is not None and blocked >= _BLOCKED:
            why = f"{blocked:.0%} of what the steps would learn was removed"
        elif pull is not None and pull >= _PULLED:
            why = f"the penalty's gradient was {pull:.2g} times as long as the loss's"
        else:
            return
        shares = {number: self._learned(samples) for number, samples in self.kept.items()}
        new = shares.pop(task, None)
        earlier = [share for share in shares.values() if share is not None]
        if new is None or not earlier:
            return
        usual = sum(earlier) / len(earlier)
        is_learned = usual < _KNOWN or new >= _LEARNED * usual
        if self._hindered or not self._method.protects or is_learned:
            return
        self._hindered = True
        self._warn(
            f"task {task} is learned poorly under the guard: its loss has come {max(0.0, new):.0%} "
            f"of the way from that of a constant answer to zero, where earlier tasks had come "
            f"{usual:.0%}, and {why}; "
            f"{self._method.advice(more=False) or 'store less'}, or train longer, or protect fewer "
            "parameters (params)"
        )

    def _learned(self, samples: StoredSamples) -> float | None:
        """How far the loss had come from that of a constant answer to zero when it was stored."""
        constant = self.model.loss.of_constant([part.target for part in samples.parts])
        losses = [part.extra["loss"] for part in samples.parts if "loss" in part.extra]
        return 1 - float(torch.cat(losses).mean()) / constant if constant and losses else None

    def _warning(self, worst: TaskDrift, removed: float | None) -> str:
        """What happened to a task, and what may help."""
        slower = "lower the learning rate"
        if math.isnan(worst.drift):
            steadied = self._method.steadied_by
            return (
                f"the outputs on task {worst.task} are no longer finite, as training has diverged: "
                f"{slower}{f' or take {steadied}' if steadied else ''}"
            )
        far = f"{worst.drift:.0%}" if worst.drift < _FAR else f"more than {_FAR} times"
        what = f"its outputs have moved by {far} of their variance since it was stored"
        if worst.changed is not None:
            what += f", {worst.changed:.0%} of its predictions changed"
        if worst.loss is not None and worst.loss_then is not None:
            what += f", its loss went from {worst.loss_then:.3g} to {worst.loss:.3g}"
        if removed is not None:
            what += (
                f", with {'only ' if removed < _LITTLE else ''}{removed:.1%} of the steps removed"
            )
        ways = [self._method.advice(more=True), slower, "use another method"]
        if has_moving_statistics(self.model.module):
            # They change the outputs whatever the weights do, so they come first.
            ways.insert(0, "keep the statistics of batch norm by freeze_batch_norm=True")
        return (
            f"task {worst.task} is being forgotten although it is guarded: {what}; "
            f"{', or '.join(filter(None, ways))}"
        )


@contextmanager
def _unnoticed(model: GuardedModel) -> Iterator[GuardedModel]:
    """The model for its outputs alone; only its weights are read."""
    device, module = model.parameters.device, model.module
    reshard(module)
    with full_precision(device), undisturbed(device), torch.no_grad(), eval_mode(model.module):
        yield model
    reshard(module)


def _outputs(model: GuardedModel, part: Part, theta: Tensor | None = None) -> dict[str, Tensor]:
    """Of samples (n, *): what their outputs are compared by, and the loss of each; on the CPU."""
    precision = model.parameters.dtype  # may have been raised since the samples were kept
    part = part.mapped(
        lambda t: t.to(torch.promote_types(t.dtype, precision)) if t.is_floating_point() else t
    )
    at_once = _SEQUENCES if model.output in ("likelihood", "tokens") else len(part)
    several = [
        _outputs_at_once(model, part.select(index), theta)
        for index in torch.arange(len(part)).split(at_once)
    ]
    return {name: torch.cat([one[name] for one in several]).cpu() for name in several[0]}


def _outputs_at_once(model: GuardedModel, part: Part, theta: Tensor | None) -> dict[str, Tensor]:
    outputs, target = model.outputs(part, theta), model.placed(part).target
    found = compared_outputs(model.output, outputs, target, part.target)
    for name, tensor in found.items():
        if name == "logits":  # the first: others may be added to them
            found[name] = tensor[:, :_WIDTH]
        elif tensor.dim() == 2 and tensor.shape[1] > _WIDTH:
            some = torch.linspace(0, tensor.shape[1] - 1, _WIDTH, device=tensor.device)
            found[name] = tensor[:, some.long()]
    try:
        model.loss.check(outputs, target, part.target)
        found["loss"] = model.loss.mean(outputs, target).expand(len(part))
    except (ConfigError, IndexError):  # IndexError: a label that is no output
        if model.loss.function is not None:
            raise
    return found


def scored(model: GuardedModel, parts: Iterable[Part]) -> Score:
    """How good the model is on samples, at the present weights.

    Arguments:
        model: the model.
        parts: the samples, batch by batch.
    """
    samples, right, losses = 0, 0.0, 0.0
    has_classes = has_loss = True
    with _unnoticed(model) as model:
        for part in parts:
            found, target = _outputs(model, part), part.target
            samples += len(part)
            classes = found.get("classes")
            has_classes &= classes is not None and target is not None and target.dim() == 1
            if has_classes and classes is not None and target is not None:
                right += float((classes == target.cpu()).sum())
            has_loss &= "loss" in found
            if has_loss:
                losses += float(found["loss"].double().sum())
    if not samples:
        raise NoSamplesError("the held-out data has no samples")
    return Score(
        samples, right / samples if has_classes else None, losses / samples if has_loss else None
    )


def _compared(
    task: int, kept: StoredSamples, model: GuardedModel, theta: Tensor | None
) -> TaskDrift:
    """The drift on a task's samples, at theta (1, p) or at the present weights."""
    values: dict[int, list[Tensor]] = {}  # K → (2, n, K), then and now
    losses, changed = [], []
    for part in kept.parts:
        now = _outputs(model, part, theta)
        if now.keys() != part.extra.keys():
            raise ConfigError("the outputs on a stored task's samples are of another kind now")
        both = {name: _paired(then, now[name]) for name, then in part.extra.items()}
        if "classes" in both:
            counts = both["classes"][0] >= 0
            changed.append((both["classes"][0] != both["classes"][1])[counts])
        if "logits" in both:
            numbers = both["logits"] - both["logits"].mean(2, keepdim=True)
        else:
            numbers = both["values"]
            if "classes" in both and counts.dim() == 2:  # every label is a sample of its own
                numbers = numbers[:, counts].unsqueeze(-1)
        values.setdefault(numbers.shape[-1], []).append(numbers)
        if "loss" in both:
            losses.append(both["loss"])
    moved = spread = 0.0
    for before, after in (torch.cat(alike, 1) for alike in values.values()):
        moved += float((after - before).square().sum())
        spread += float((before - before.mean(0)).square().sum())
    drift = moved / spread if spread else math.inf if moved else 0.0
    loss_then, loss = torch.cat(losses, 1).mean(1).tolist() if losses else (None, None)
    return TaskDrift(
        task,
        len(kept),
        drift if math.isfinite(moved) else math.nan,
        float(torch.cat(changed).double().mean()) if changed else None,
        loss_then,
        loss,
    )


def _paired(then: Tensor, now: Tensor) -> Tensor:
    """Both as (2, n, *) in float64, of a head that has grown the outputs that it had before."""
    now = now[:, : then.shape[1]] if then.dim() == now.dim() == 2 else now
    if then.shape != now.shape:
        shapes = f"{tuple(now.shape)} and were {tuple(then.shape)}"
        raise ConfigError(f"the outputs on a stored task's samples are {shapes}")
    return torch.stack([then, now]).double()
