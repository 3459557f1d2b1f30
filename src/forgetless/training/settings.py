"""The settings of training, and the progress that observers get."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from forgetless.subspace import STORAGES
from forgetless.support.validation import (
    AUTO,
    SHARE,
    SHARE_OR_ZERO,
    Accepted,
    check_options,
    is_real,
    option,
    parse_bytes,
    real,
    require,
    whole,
)
from forgetless.trace import average_accuracy, forgetting
from forgetless.training.sampling import AUGMENTATIONS

# The elementwise optimizers of torch.optim: on stacked weights they treat each seed by itself.
OPTIMIZERS = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
}
WITH_MOMENTUM = ("sgd", "rmsprop")
SCHEDULES = ("constant", "cosine", "linear", "step", "plateau")
_LARGEST_LR = 1e38  # float32 holds no more
_LR = Accepted(lambda value: is_real(value) and 0 < value < _LARGEST_LR, "a positive number")


def _named_or_made(names: Any, what: str) -> Accepted:
    """A name, a function, or where one is: "file.py:function".

    Of other texts only those that look like a name are rejected: a trace describes a function in
    words, and its settings must be readable without it.
    """

    def fits(value: object) -> bool:
        named = isinstance(value, str) and (value in names or not re.fullmatch(r"[\w-]*", value))
        return named or callable(value)

    known = ", ".join(name or "nothing" for name in names)
    return Accepted(fits, f"{known}, a function of {what}, or file.py:function", tuple(names))


@dataclass(frozen=True, kw_only=True)
class Training:
    """How to train on each task; by default plain SGD, θ ← θ − lr · g̃."""

    epochs: int = option(10, "Passes over the training set of each task.", accepted=whole(1))
    batch_size: int = option(32, "Samples in a step.", accepted=whole(1))
    lr: float = option(1e-3, "Learning rate.", accepted=_LR, search=(0.001, 0.003, 0.01, 0.03, 0.1))
    optimizer: str | Callable[[list[Any]], Any] = option(
        "sgd",
        "Optimizer, new for each task: a name, or file.py:function of parameters that returns one "
        "(with its own lr).",
        accepted=_named_or_made(OPTIMIZERS, "parameters"),
    )
    momentum: float = option(0.0, "Momentum of sgd and rmsprop.", accepted=SHARE_OR_ZERO)
    weight_decay: float = option(0.0, "Weight decay.", accepted=real(0))
    schedule: str = option("constant", "Learning rate within a task.", choices=SCHEDULES)
    decay: float = option(0.5, "Factor of the schedules step and plateau.", accepted=SHARE)
    decay_after: int = option(
        5,
        "Epochs after which step decays, or without a better held-out loss after which plateau "
        "does.",
        accepted=whole(1),
    )
    least_lr: float = option(1e-5, "plateau ends the task below this.", accepted=real(0))
    augmentation: str | Callable[[Any, Any], Any] = option(
        "",
        "Random changes of training images: crop, flip, crop-flip, or file.py:function of inputs "
        "and a generator.",
        accepted=_named_or_made(tuple(AUGMENTATIONS), "inputs and a generator"),
    )
    held_out: float = option(
        0.0,
        "Share of each task's training samples held out for early stopping and plateau.",
        accepted=SHARE_OR_ZERO,
    )
    early_stopping: int = option(
        0,
        "End a task after so many epochs without a better held-out loss, at its best weights; 0 "
        "for never.",
        accepted=whole(0),
    )
    dtype: str = option("float32", "Floating-point type.", choices=("float32", "float64"))
    shuffle: bool = option(
        True, "Shuffle a task's samples anew in every epoch; otherwise they keep their order."
    )
    freeze: str = option(
        "", "Freeze these parameters: names, or beginnings in whole parts (comma-separated)."
    )
    unprotected: str = option(
        "",
        "Train parameters with these names, or beginnings, out of the method's reach, as heads "
        "are.",
    )
    eval_mode_after: int = option(
        0,
        "Train in eval mode, batch norm fixed, from this step of the run on; 0 for never.",
        accepted=whole(0),
    )
    storage: str = option(
        "dense",
        "Store directions as float32 rows, in bfloat16, on the CPU, or as factored samples.",
        choices=tuple(STORAGES),
    )
    budget: str = option(
        "",
        "Bytes for stored directions, such as 4GB, or auto for a share of free memory: chooses the "
        "first storage that fits, and fewer directions if none does.",
    )
    evaluate: str = option(
        "seen", "Evaluate on the tasks seen so far, or on all.", choices=("seen", "all")
    )
    evaluation_batch: int = option(
        0,
        "Samples evaluated together at most, which matters where they interact, as in batch norm "
        "without running statistics; 0 for as many as fit.",
        accepted=whole(0),
    )
    evaluate_every: int = option(
        0,
        "Epochs after which to evaluate within a task, too; 0 for at its end alone. The best "
        "accuracies are noted in the trace's outcome.",
        accepted=whole(0),
    )
    seeds_together: int = option(
        0,
        "Seeds trained in one batched program; 0 for all on a GPU and one on a CPU.",
        accepted=whole(0),
    )

    def __post_init__(self) -> None:
        check_options(Training, vars(self))
        self._check_optimizer()
        if self.budget not in ("", AUTO):
            parse_bytes(self.budget)
        for name in ("freeze", "unprotected"):
            names = getattr(self, name)
            require(isinstance(names, str), name, names, "names in one string, separated by commas")

    def _check_optimizer(self) -> None:
        """Reject settings that contradict each other or would not be used."""
        named = self.optimizer in OPTIMIZERS if isinstance(self.optimizer, str) else False
        accepted = f"0 for another optimizer than {' and '.join(WITH_MOMENTUM)}"
        fits = not self.momentum or self.optimizer in WITH_MOMENTUM
        require(fits, "momentum", self.momentum, accepted)
        accepted = "0 for an optimizer that a function makes, which sets its own"
        require(named or not self.weight_decay, "weight_decay", self.weight_decay, accepted)
        accepted = "a share in (0, 1) for the plateau schedule and early stopping"
        require(self.held_out > 0 or not self.watches_held_out, "held_out", self.held_out, accepted)
        accepted = "0 without the plateau schedule and early stopping, which alone use it"
        require(self.watches_held_out or not self.held_out, "held_out", self.held_out, accepted)

    @property
    def watches_held_out(self) -> bool:
        """Whether training depends on the loss on held-out samples."""
        return self.schedule == "plateau" or self.early_stopping > 0

    @property
    def unused(self) -> dict[str, str]:
        """The settings that have no effect here: name → what they belong to."""
        step, plateau = self.schedule == "step", self.schedule == "plateau"
        uses = {
            "decay": ("the schedules step and plateau", step or plateau),
            "decay_after": ("the schedules step and plateau", step or plateau),
            "least_lr": ("the schedule plateau", plateau),
            "momentum": (f"{' and '.join(WITH_MOMENTUM)}", self.optimizer in WITH_MOMENTUM),
            "held_out": ("early stopping and the schedule plateau", self.watches_held_out),
        }
        return {name: owner for name, (owner, used) in uses.items() if not used}

    def lr_factor(self, done: float, decays: int) -> float:
        """The present learning rate over the first one of the task.

        Arguments:
            done: finished epochs of the task, a fraction within one.
            decays: how often a plateau has decayed it.
        """
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * done / self.epochs)) / 2
        if self.schedule == "linear":
            return 1 - done / self.epochs
        if self.schedule == "step":
            decays = int(done) // self.decay_after
        return float(self.decay**decays)

    @property
    def is_plain_sgd(self) -> bool:
        """Whether the optimizer is SGD without momentum and weight decay."""
        return self.optimizer == "sgd" and not self.momentum and not self.weight_decay

    @property
    def is_constant_sgd(self) -> bool:
        """Whether all steps are alike: plain SGD at one rate on the samples as they are."""
        return self.is_plain_sgd and self.schedule == "constant" and not self.augmentation

    @property
    def trains_one_seed(self) -> bool:
        """Whether seeds must train one by one, whatever `seeds_together` says."""
        return self.watches_held_out or self.optimizer not in OPTIMIZERS

    @property
    def prefixes(self) -> dict[str, tuple[str, ...]]:
        """The prefixes of parameter names in `freeze` and `unprotected`."""
        settings = {"freeze": self.freeze, "unprotected": self.unprotected}
        return {
            setting: tuple(part.strip() for part in text.split(",") if part.strip())
            for setting, text in settings.items()
        }


@final
@dataclass(frozen=True)
class Progress:
    """The progress of a run, after every epoch and every task."""

    seeds: tuple[int, ...]
    task: int  # from 1
    tasks: int
    epoch: int  # from 1
    epochs: int
    done: float  # share of the whole run
    accuracy: float | None  # mean over the tasks so far, in percent; None before the first
    measured: list[list[float]]  # after this task, [seed][on task], NaN before evaluation


@final
class Measurements:
    """The accuracy matrix of each seed as it fills in."""

    def __init__(self) -> None:
        self._accuracy: dict[int, NDArray[np.float64]] = {}

    @property
    def mean(self) -> NDArray[np.float64]:
        """The accuracy after each task on each task, mean over the seeds that have it, (T, T)."""
        known = np.stack(list(self._accuracy.values()))
        counts = np.isfinite(known).sum(axis=0)
        sums = np.nansum(known, axis=0)
        return np.asarray(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))

    def new(self, progress: Progress) -> Iterator[tuple[int, int, dict[str, float]]]:
        """For each seed that was evaluated: seed, number of the task (from 1), named numbers."""
        t, tasks = progress.task - 1, progress.tasks
        for seed, row in zip(progress.seeds, progress.measured, strict=True):
            if not np.isfinite(row[t]):
                continue
            matrix = self._accuracy.setdefault(seed, np.full((tasks, tasks), np.nan))
            matrix[t] = row
            digits = len(str(tasks))
            numbers = {
                f"accuracy/task {s + 1:0{digits}d}": float(value)
                for s, value in enumerate(row)
                if np.isfinite(value)
            }
            numbers["average accuracy"] = float(average_accuracy(matrix))
            numbers["forgetting"] = float(forgetting(matrix))
            yield seed, progress.task, numbers


Observer = Callable[[Progress], None]


def several(*observers: Observer) -> Callable[[Progress], None]:
    """One observer that calls several, in their order."""

    def call(progress: Progress) -> None:
        for observer in observers:
            observer(progress)

    return call
