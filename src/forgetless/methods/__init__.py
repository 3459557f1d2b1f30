"""Continual-learning methods, one file each, behind one interface."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, final

from forgetless.methods.agem import AGEM
from forgetless.methods.base import (
    FinishedTask,
    LoadSamples,
    LossGrad,
    Method,
    Nothing,
    Samples,
    SampleSet,
    State,
)
from forgetless.methods.ewc import EWC
from forgetless.methods.gem import GEM
from forgetless.methods.gem_nt import GEMNT
from forgetless.methods.joint import Joint
from forgetless.methods.ogd import OGD
from forgetless.methods.orthogonal import Orthogonal
from forgetless.methods.pca_ogd import PCAOGD
from forgetless.methods.sgd import SGD
from forgetless.support.errors import ConfigError
from forgetless.support.options import option
from forgetless.support.validation import SHARE, real, whole

__all__ = [
    "AGEM",
    "EWC",
    "GEM",
    "GEMNT",
    "METHODS",
    "OGD",
    "PCAOGD",
    "SGD",
    "FinishedTask",
    "Joint",
    "LoadSamples",
    "LossGrad",
    "Method",
    "MethodOptions",
    "Nothing",
    "SampleSet",
    "Samples",
    "State",
    "build_method",
    "unused_by_method",
]


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """The hyperparameters of all methods, as the command line names them."""

    memory: int = option(
        100,
        "Directions or samples that a method keeps of each task; as SIZE or auto, what those of "
        "all tasks may take (see --budget).",
        accepted=whole(1),
    )
    samples: int = option(3000, "Gradients that PCA-OGD looks at in each task.", accepted=whole(1))
    variance: float | None = option(
        None,
        "PCA-OGD keeps the directions that explain this share of variance, not --memory.",
        accepted=SHARE,
    )
    centred: bool = option(False, "PCA-OGD takes the mean gradient out first.")
    agem_batch: int = option(256, "Remembered samples in a step of A-GEM.", accepted=whole(1))
    agem_heads: str = option(
        "own",
        "A-GEM sends a remembered sample through its own head, or as the paper's code did.",
        choices=("own", "released"),
    )
    gem_margin: float = option(0.0, "Lower bound of the dual variables of GEM.", accepted=real(0))
    joint_batch: int = option(
        32, "Earlier tasks' samples in a step of joint training.", accepted=whole(1)
    )
    ewc_strength: float = option(10.0, "Weight of the penalty of EWC.", accepted=real(0))
    ewc_fisher: str = option(
        "mean",
        "EWC's Fisher as the mean over samples, or their sum over 1,024 as in the paper's code.",
        choices=("mean", "released"),
    )


# Settings of the training that are for methods which keep directions.
_OF_DIRECTIONS = {"storage", "budget"}
_Builder = Callable[[Any], Method[Any]]

METHODS: dict[str, tuple[str, _Builder]] = {
    SGD.name: ("plain SGD, the lower reference", lambda o: SGD()),
    Joint.name: (
        "training on all tasks so far, the upper reference",
        lambda o: Joint(o.joint_batch),
    ),
    EWC.name: (
        "elastic weight consolidation: a spring on every weight",
        lambda o: EWC(o.ewc_strength, o.ewc_fisher),
    ),
    AGEM.name: (
        "averaged GEM: no step against the memory's loss gradient",
        lambda o: AGEM(o.memory, o.agem_batch, o.agem_heads),
    ),
    GEM.name: (
        "gradient episodic memory: no step against any task's loss gradient",
        lambda o: GEM(o.memory, o.gem_margin),
    ),
    GEMNT.name: (
        "GEM without transfer: steps orthogonal to every task's loss gradient",
        lambda o: GEMNT(o.memory),
    ),
    OGD.name: (
        "orthogonal gradient descent: steps orthogonal to samples' features",
        lambda o: OGD(o.memory),
    ),
    PCAOGD.name: (
        "PCA-OGD: steps orthogonal to the principal directions of the features",
        lambda o: PCAOGD(o.memory if o.variance is None else o.variance, o.samples, o.centred),
    ),
}


def build_method(name: str, options: MethodOptions) -> Method[Any]:
    """The method of that name with its share of the options."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    return METHODS[name][1](options)


def unused_by_method(name: str, *, by_variance: bool = False) -> set[str]:
    """The options that the method of that name has no use for, those of its directions too.

    Arguments:
        by_variance: a share of variance is given, which takes the place of a number of directions.
    """
    noting = _Noting(MethodOptions(variance=0.5 if by_variance else None))
    method = METHODS[name][1](noting)
    unused = {f.name for f in fields(MethodOptions)} - noting.seen
    unused |= {"unprotected"} if isinstance(method, SGD) else set()  # it protects nothing
    return unused if isinstance(method, Orthogonal) else unused | _OF_DIRECTIONS


@final
class _Noting:
    """Options that note which of them were looked at."""

    def __init__(self, options: MethodOptions) -> None:
        self._options = options
        self.seen: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.seen.add(name)
        return getattr(self._options, name)
