"""How directions are stored, the memory that they will need, and what fits a budget."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Literal, Self, final

import torch

from forgetless.linalg import Layout
from forgetless.support.collectives import Ranks
from forgetless.support.memory import free_memory, total_memory
from forgetless.support.validation import (
    AUTO,
    MemoryShortageError,
    first_line,
    format_bytes,
    parse_bytes,
    require,
    whole,
)
from forgetless.tangent import TangentFeatures, stored, stored_bytes

StorageKind = Literal["dense", "factored"]

# Bytes that K directions take for their (K, K) matrices in float64, divided by K².
SQUARE_BYTES: dict[StorageKind, int] = {"dense": 8, "factored": 24}
# The share of the free memory for directions: while those of a task are added, old and new rows
# exist at once, and training needs memory too.
_SHARE_OF_FREE = 0.4
# The order of preference: exact and fast, exact and small, rounded, slow.
_TRIED = ("dense", "factored", "bfloat16", "cpu")


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


def most_directions(each: float, square: int, budget: float) -> int:
    """The largest K for which each · K + square · K² bytes fit the budget."""
    if square == 0:
        return int(budget / each)
    return int((sqrt(each * each + 4 * square * budget) - each) / (2 * square))


@final
@dataclass(frozen=True)
class Demand:
    """The directions that a method stores for each task.

    Arguments:
        samples: samples whose features are computed.
        directions: the most directions stored.
        combined: whether a direction is a weighted sum of all samples' features, so that fewer
            directions need no fewer samples.
    """

    samples: int
    directions: int
    combined: bool


@final
@dataclass(frozen=True)
class Footprint:
    """The memory that the directions of a run need at its end.

    Arguments:
        demand: the directions that the method asks for.
        size: p, numbers per direction.
        itemsize: bytes per number.
        factored: bytes per factored sample.
        tasks: number of tasks.
        seeds: number of seeds in memory at once.
    """

    demand: Demand
    size: int
    itemsize: int
    factored: float
    tasks: int = 1
    seeds: int = 1

    @classmethod
    def of(cls, phi: TangentFeatures, demand: Demand, **counts: int) -> "Footprint":
        """Estimated from the features of a few samples."""
        one = stored_bytes(stored(phi)) / len(phi)
        return cls(demand, phi.shape[1], phi.like.element_size(), one, **counts)

    @property
    def directions(self) -> int:
        """The most directions of all tasks."""
        return self.tasks * self.demand.directions

    def bytes(self, storage: Storage) -> int:
        """Bytes in that storage, for all seeds."""
        count = self.directions
        count = count if storage.max_rank is None else min(count, storage.max_rank)
        one, square = self._growth(storage)
        needed = count * one + square * count**2
        if storage.kind == "factored" and self.demand.combined:
            # A principal direction is a sum of samples, with a weight in float64 for each.
            samples = self.tasks * self.demand.samples
            needed = samples * one + square * count**2 + 8 * count * samples
        return int(self.seeds * needed)

    def _growth(self, storage: Storage) -> tuple[float, int]:
        """a and b of a K + b K², the bytes of K directions of a seed, each a row or a sample."""
        row = self.size * (self.itemsize if storage.dtype is None else storage.dtype.itemsize)
        return self.factored if storage.kind == "factored" else row, SQUARE_BYTES[storage.kind]

    def most(self, storage: Storage, budget: float) -> int:
        """The most directions per seed that fit the budget, each a row or a sample."""
        return most_directions(*self._growth(storage), budget / self.seeds)


def fitting_storage(needs: Footprint, budget: float, device: torch.device) -> Storage:
    """The first storage with which all directions fit the budget, or else as many as fit.

    Arguments:
        needs: the directions' footprint.
        budget: bytes on the device of the weights.
        device: the device of the weights.
    """
    for name in _TRIED:
        storage = STORAGES[name]
        if storage.device is None:
            fits = needs.bytes(storage) <= budget
        else:  # rows in main memory, which helps only if the weights are not there
            fits = device.type != "cpu" and needs.bytes(storage) <= budget_of(storage.device)
        if fits:
            return storage
    # Fewer principal directions need as many factored samples.
    smallest = ("bfloat16",) if needs.demand.combined else ("factored", "bfloat16")
    best = max((STORAGES[name] for name in smallest), key=lambda way: needs.most(way, budget))
    most = needs.most(best, budget)
    if most < 1:
        least = min(needs.bytes(replace(STORAGES[name], max_rank=1)) for name in smallest)
        raise MemoryShortageError(
            f"budget must be enough for at least one direction, {format_bytes(least)} for this "
            f"model, not {format_bytes(budget)}"
        )
    return replace(best, max_rank=most)


def budget_of(device: torch.device, budget: str = AUTO) -> float:
    """A budget in bytes; "auto" is a share of the device's free memory."""
    return _SHARE_OF_FREE * free_memory(device) if budget == AUTO else parse_bytes(budget)


def is_shortage(error: BaseException) -> bool:
    """Whether the error is torch running out of memory, on a GPU or in main memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def shortage(
    error: BaseException, where: str, device: torch.device, needs: Footprint | None, now: Storage
) -> MemoryShortageError:
    """The error for a run that ran out of memory: what it needed, and what would fit.

    Arguments:
        where: the part of the run, such as "in task 3".
        needs: the directions' footprint; None for methods that keep no directions.
        now: their storage.
    """
    reason = first_line(error).rstrip(".")
    if device.type == "cuda":
        free, total = free_memory(device), total_memory(device)
        reason = f"{format_bytes(total - free)} of {format_bytes(total)} in use ({reason})"
    if needs is None:
        remedy = "a smaller batch_size, memory or model, or fewer seeds_together, may fit"
    else:
        others = [n for n in _TRIED if STORAGES[n] != now and (n != "cpu" or device.type != "cpu")]
        sizes = [f"{format_bytes(needs.bytes(STORAGES[n]))} with storage {n}" for n in others]
        remedy = (
            f"its {needs.directions} directions take {format_bytes(needs.bytes(now))} as {now}, "
            f"{', '.join(sizes)}, and less with a smaller memory; budget auto picks a storage"
        )
    return MemoryShortageError(f"there is not enough memory {where}: {reason}; {remedy}")
