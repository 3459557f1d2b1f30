"""How a task is learned, and what an observer of a run is told."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from forgetless.support.errors import require
from forgetless.support.options import check_options, option
from forgetless.support.sizes import AUTO, parsed_bytes
from forgetless.support.validation import Accepted, is_real, whole

_STORAGES = ("dense", "bfloat16", "cpu", "factored")
_LARGEST_LR = 1e38  # what float32 can hold
_LR = Accepted(lambda value: is_real(value) and 0 < value < _LARGEST_LR, "a positive number")


@dataclass(frozen=True, kw_only=True)
class Training:
    """How each task is learned: plain SGD, θ ← θ − lr · g̃."""

    epochs: int = option(10, "Passes over the training set of each task.", accepted=whole(1))
    batch_size: int = option(32, "Samples in a step.", accepted=whole(1))
    lr: float = option(1e-3, "Learning rate.", accepted=_LR)
    dtype: str = option("float32", "Floating-point type.", choices=("float32", "float64"))
    freeze: str = option(
        "", "Parameters whose names start with one of these (comma-separated) are not trained."
    )
    unprotected: str = option(
        "",
        "Parameters whose names start with one of these are trained out of the method's reach, as "
        "heads are.",
    )
    eval_mode_after: int = option(
        0,
        "Train in eval mode, batch norm fixed, from this step of the run on; 0 for never.",
        accepted=whole(0),
    )
    storage: str = option(
        "dense",
        "Directions are kept as float32 rows, in bfloat16, on the CPU, or as factored samples.",
        choices=_STORAGES,
    )
    budget: str = option(
        "",
        "Bytes that stored directions may take, such as 4GB, or auto for what is free: chooses the "
        "storage that fits, and fewer directions if none does.",
    )
    evaluate: str = option(
        "seen", "Evaluate on the tasks seen so far, or on all.", choices=("seen", "all")
    )
    seeds_together: int = option(
        0,
        "Seeds trained in one batched program; 0 for all on a GPU and one on a CPU.",
        accepted=whole(0),
    )

    def __post_init__(self) -> None:
        check_options(Training, vars(self))
        if self.budget not in ("", AUTO):
            parsed_bytes(self.budget)
        for name in ("freeze", "unprotected"):
            names = getattr(self, name)
            require(isinstance(names, str), name, names, "names in one text, separated by commas")

    @property
    def beginnings(self) -> dict[str, tuple[str, ...]]:
        """What names of parameters start with, by the setting that has a say on these."""
        settings = {"freeze": self.freeze, "unprotected": self.unprotected}
        return {
            setting: tuple(part.strip() for part in text.split(",") if part.strip())
            for setting, text in settings.items()
        }


@final
@dataclass(frozen=True)
class Progress:
    """Where a run is: what an observer is told after every epoch and every task."""

    seeds: tuple[int, ...]
    task: int  # from 1
    tasks: int
    epoch: int  # from 1
    epochs: int
    done: float  # share of the whole run
    accuracy: float | None  # mean over the tasks so far in percent, once one was evaluated
    measured: list[list[float]]  # after this task, [seed][on task], NaN while not evaluated


Observer = Callable[[Progress], None]
