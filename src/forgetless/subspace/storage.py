"""How directions are stored: as rows or as samples' factors, how precisely, and where."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal, Self, final

import torch

from forgetless.support.collectives import Ranks
from forgetless.support.errors import require
from forgetless.support.layout import Layout
from forgetless.support.options import whole

StorageKind = Literal["dense", "factored"]


@final
@dataclass(frozen=True)
class Storage:
    """A choice between memory, speed and precision.

    Arguments:
        kind: "dense" stores every direction as a row of p numbers; "factored" stores the samples'
            inputs and output gradients layer by layer, n_in + n_out numbers instead of
            n_in · n_out, exactly.
        dtype: of dense rows; None for that of the weights. bfloat16 leaves about 1e-3 of a
            protected component in a step.
        device: of dense rows; None for that of the weights. Rows elsewhere are copied every step.
        max_rank: the most directions. Beyond it, those stay that explain most of the variance of
            all tasks' features, each task with the same weight: the best mixtures of dense rows,
            or factored samples chosen greedily.
        ranks: the processes that each hold some columns of a vector; None if all are here.
        layout: which columns are here, if there are several such processes.
    """

    kind: StorageKind = "dense"
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    max_rank: int | None = None
    ranks: Ranks | None = None
    layout: Layout | None = None

    def __post_init__(self) -> None:
        require(self.kind in ("dense", "factored"), "storage", self.kind, "'dense' or 'factored'")
        some = whole(1)
        fits = self.max_rank is None or some.fits(self.max_rank)
        require(fits, "max_rank", self.max_rank, f"{some.words}, or None")
        real = self.dtype is None or (
            isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point
        )
        require(real, "the storage's dtype", self.dtype, "a floating-point type")
        there = self.device is None or isinstance(self.device, torch.device)
        require(there, "the storage's device", self.device, "a torch.device or None")
        plain = self.kind == "dense" or (self.dtype is None and self.device is None)
        require(plain, "storage", "factored with a dtype or device", "factored as it is")
        rows = self.kind == "dense" or self.ranks is None
        accepted = "'dense', 'bfloat16' or 'cpu' for a sharded model"
        require(rows, "storage", self.kind, accepted)

    def described(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {
            "kind": self.kind,
            "dtype": None if self.dtype is None else str(self.dtype)[6:],
            "device": None if self.device is None else str(self.device),
            "max_rank": None if self.max_rank is None else int(self.max_rank),
        }

    @classmethod
    def from_description(cls, kept: Mapping[str, Any]) -> Self:
        """From `described`; a device that this machine lacks is dropped."""
        dtype = None if kept["dtype"] is None else getattr(torch, kept["dtype"])
        device = None if kept["device"] is None else torch.device(kept["device"])
        if device is not None:
            try:
                torch.empty(0, device=device)
            except (RuntimeError, AssertionError, NotImplementedError):
                device = None
        return cls(kept["kind"], dtype, device, kept["max_rank"])

    def __str__(self) -> str:
        if self.kind == "factored":
            return "factored samples"
        where = f" on {self.device}" if self.device is not None else ""
        over = "" if self.ranks is None else f", columns over {self.ranks.size} ranks"
        return f"dense rows{f' in {str(self.dtype)[6:]}' if self.dtype else ''}{where}{over}"


DENSE = Storage()
FACTORED = Storage("factored")
STORAGES = {
    "dense": DENSE,
    "bfloat16": Storage(dtype=torch.bfloat16),
    "cpu": Storage(device=torch.device("cpu")),
    "factored": FACTORED,
}
# Bytes that K directions take for their (K, K) matrices in float64, divided by K².
SQUARE_BYTES: dict[StorageKind, int] = {"dense": 8, "factored": 24}


def most_directions(each: float, square: int, budget: float) -> int:
    """The largest K for which each · K + square · K² bytes fit the budget."""
    if square == 0:
        return int(budget / each)
    return int((sqrt(each * each + 4 * square * budget) - each) / (2 * square))
