"""Remembered samples: what all methods that follow the loss on them have in common."""

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Protocol, Self, TypeVar

from torch import Tensor

from forgetless.methods.base import LoadSamples, Method, State
from forgetless.subspace import DENSE, Storage


class KeptSamples(State, Protocol):
    """Samples of earlier tasks; made without arguments, none yet."""

    @classmethod
    def restore(cls, of_seeds: Sequence[Mapping[str, Tensor]], load: LoadSamples) -> Self:
        """From what `tensors` gave for each seed."""


K = TypeVar("K", bound=KeptSamples)


class Rehearsal(Method[K], ABC):
    """A method that keeps samples of earlier tasks, and follows the loss on them."""

    kept: type[K]

    @property
    def reaches_heads(self) -> bool:
        """The loss on earlier tasks depends on their heads."""
        return True

    def init(self, theta: Tensor, storage: Storage = DENSE) -> K:
        """No samples yet."""
        return self.kept()

    def restore(
        self,
        of_seeds: Sequence[Mapping[str, Tensor]],
        theta: Tensor,
        storage: Storage,
        load: LoadSamples,
    ) -> K:
        """The remembered samples."""
        return self.kept.restore(of_seeds, load)


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names start with the prefix and a dot, named by what follows it."""
    cut = len(prefix) + 1
    return {n[cut:]: t for n, t in tensors.items() if n.startswith(f"{prefix}.")}
