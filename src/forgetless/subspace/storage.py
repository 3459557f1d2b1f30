"""How remembered directions are kept: as rows or as samples' factors, how precisely, and where."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, final

import torch

from forgetless.support.collectives import Ranks
from forgetless.support.errors import require
from forgetless.support.validation import whole

Kind = Literal["dense", "factored"]


@final
@dataclass(frozen=True)
class Storage:
    """A choice between memory, speed and precision.

    Arguments:
        kind: "dense" keeps every direction as a row of p numbers; "factored" keeps the samples'
            inputs and output gradients layer by layer, n_in + n_out numbers instead of
            n_in · n_out, exactly.
        dtype: of dense rows; None is that of the weights. In bfloat16 about 1e-3 of a protected
            component stays in a step.
        device: of dense rows; None is where the weights are. Rows elsewhere travel at every step.
        max_rank: the most directions that are kept. When there are more, those stay that explain
            most of the variance of all tasks' remembered features, every task counting the same:
            of dense rows the best mixtures, of factored samples those that add most, one after
            the other.
        ranks: the processes that each hold some columns of dense rows; None where all columns
            are here.
    """

    kind: Kind = "dense"
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    max_rank: int | None = None
    ranks: Ranks | None = None

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
        """In plain values, for a file."""
        return {
            "kind": self.kind,
            "dtype": None if self.dtype is None else str(self.dtype)[6:],
            "device": None if self.device is None else str(self.device),
            "max_rank": None if self.max_rank is None else int(self.max_rank),
        }

    @classmethod
    def from_description(cls, kept: Mapping[str, Any]) -> Self:
        """From what `described` gave; a device that this machine does not have is left out."""
        dtype = None if kept["dtype"] is None else getattr(torch, kept["dtype"])
        device = None if kept["device"] is None else torch.device(kept["device"])
        if device is not None:
            try:
                torch.empty(0, device=device)
            except (RuntimeError, AssertionError, NotImplementedError):
                device = None  # rows are where the weights are
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
