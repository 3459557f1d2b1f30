"""What remembered directions take in memory before they are there, and what would fit."""

import os
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import final

import torch

from forgetless.subspace.storage import STORAGES, Storage
from forgetless.support.errors import MemoryShortageError
from forgetless.support.sizes import in_words
from forgetless.tangent import TangentFeatures, stored, stored_bytes

# Of the memory that is free, what directions may take: while those of a task are added, the old
# rows and the new ones are there at once, and training needs room too.
_SHARE_OF_FREE = 0.4
# In the order in which they are tried: exact and fast, exact and small, rounded, slow.
_TRIED = ("dense", "factored", "bfloat16", "cpu")


@final
@dataclass(frozen=True)
class Demand:
    """Directions that a method asks to store for each task.

    Arguments:
        samples: samples whose features are computed.
        directions: stored directions, at most.
        combined: whether a direction is a weighted sum of all samples' features, so that fewer
            directions need as many samples.
    """

    samples: int
    directions: int
    combined: bool


@final
@dataclass(frozen=True)
class Footprint:
    """What the directions of a run take at its end.

    Arguments:
        demand: the directions that the method asks for.
        size: p, the numbers of a direction.
        itemsize: bytes of one of them.
        factored: bytes of a sample as factors.
        tasks: how many tasks are learned.
        seeds: how many are in memory at once.
    """

    demand: Demand
    size: int
    itemsize: int
    factored: float
    tasks: int = 1
    seeds: int = 1

    @classmethod
    def of(cls, phi: TangentFeatures, demand: Demand, **counts: int) -> "Footprint":
        """By the features of a few samples."""
        one = stored_bytes(stored(phi)) / len(phi)
        return cls(demand, phi.shape[1], phi.like.element_size(), one, **counts)

    @property
    def directions(self) -> int:
        """Of all tasks together, at most."""
        return self.tasks * self.demand.directions

    def bytes(self, storage: Storage) -> int:
        """What they take in that storage, all seeds together."""
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
        """K directions of a seed, if each is a row or a sample, take a K + b K² bytes: a and b."""
        if storage.kind == "factored":
            return self.factored, 24
        return self.size * (self.itemsize if storage.dtype is None else storage.dtype.itemsize), 8

    def most(self, storage: Storage, budget: float) -> int:
        """How many directions fit, of PCA-OGD's in rows: the largest K for which they do."""
        one, square = self._growth(storage)
        return int((sqrt(one * one + 4 * square * budget / self.seeds) - one) / (2 * square))


def fitting_storage(needs: Footprint, budget: float, device: torch.device) -> Storage:
    """The first way to keep all directions in `budget` bytes; if there is none, as many as fit.

    Arguments:
        needs: what they take.
        budget: bytes on the device of the weights.
        device: where the weights are.
    """
    for name in _TRIED:
        storage = STORAGES[name]
        if storage.device is None:
            fits = needs.bytes(storage) <= budget
        else:  # rows in main memory, which helps only if the weights are elsewhere
            fits = device.type != "cpu" and needs.bytes(storage) <= budget_of(storage.device)
        if fits:
            return storage
    # Fewer principal directions are sums of as many samples, so factors would not become smaller.
    smallest = ("bfloat16",) if needs.demand.combined else ("factored", "bfloat16")
    best = max((STORAGES[name] for name in smallest), key=lambda way: needs.most(way, budget))
    most = needs.most(best, budget)
    if most < 1:
        least = min(needs.bytes(replace(STORAGES[name], max_rank=1)) for name in smallest)
        raise MemoryShortageError(
            f"--budget must be enough for at least one direction, {in_words(least)} for this "
            f"model, not {in_words(budget)}"
        )
    return replace(best, max_rank=most)


def budget_of(device: torch.device) -> float:
    """What directions may take of the memory that is free there."""
    return _SHARE_OF_FREE * _free(device)


def _free(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    except (OSError, ValueError):
        pass  # a system without it
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return float(os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    return float("inf")


def is_shortage(error: BaseException) -> bool:
    """Whether torch found no memory, on a GPU or in main memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def shortage(
    error: BaseException, where: str, device: torch.device, needs: Footprint | None, now: Storage
) -> MemoryShortageError:
    """One sentence on what was wanted, what there is, and what would fit.

    Arguments:
        where: what the run was doing.
        needs: what the directions take, None for a method that keeps none.
        now: how they are kept.
    """
    reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reason = f"{in_words(total - free)} of {in_words(total)} in use ({reason})"
    if needs is None:
        remedy = "a smaller --batch-size, --memory or model, or fewer --seeds-together, may fit"
    else:
        others = [n for n in _TRIED if STORAGES[n] != now and (n != "cpu" or device.type != "cpu")]
        sizes = [f"{in_words(needs.bytes(STORAGES[n]))} with --storage {n}" for n in others]
        remedy = (
            f"its {needs.directions} directions take {in_words(needs.bytes(now))} as {now}, "
            f"{', '.join(sizes)}, and fewer with a smaller --memory; --budget auto picks one"
        )
    return MemoryShortageError(f"there is not enough memory {where}: {reason}; {remedy}")
