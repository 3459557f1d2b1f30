"""Collectives among the processes that train one model: sum, broadcast, gather."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from forgetless.support.validation import RankError


def reason_of(error: BaseException) -> str:
    """The reason of a failed collective, without the source line and advice that gloo adds."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^]]*\] |\. This is typically.*", "", lines[-1])


def is_lost(error: BaseException) -> bool:
    """Whether an error of a model that is run is one of the connection between processes."""
    return isinstance(error, dist.DistBackendError) or "gloo" in str(error)


@final
class Ranks:
    """The processes of a group, including this one; all must make the same calls.

    Arguments:
        group: a process group of `torch.distributed`.
        device: the device from which the group sends tensors.

    Attributes:
        calls: the number of collectives so far.
        bytes: the bytes that this process passed to them.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.calls = 0
        self.bytes = 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, bit for bit the same on each."""
        total = tensor.to(self.device, copy=True).contiguous()
        with self._collective(total):
            dist.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """One rank's tensor, by default the first's; every rank passes one like it."""
        copy = tensor.to(self.device, copy=True).contiguous()
        with self._collective(copy):
            dist.broadcast(copy, dist.get_global_rank(self.group, source), group=self.group)
        return copy.to(tensor.device)

    def gather(self, vector: Tensor) -> list[Tensor]:
        """The vectors (n,) of all ranks, of any lengths."""
        lengths = self._stacked(torch.tensor([len(vector)])).flatten().tolist()
        padded = vector.new_zeros(max(lengths))
        padded[: len(vector)] = vector
        rows = self._stacked(padded)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def _stacked(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, (R, *)."""
        mine = tensor.to(self.device).contiguous()
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self._collective(mine):
            dist.all_gather(found, mine, group=self.group)
        return torch.stack(found).to(tensor.device)

    @contextmanager
    def _collective(self, tensor: Tensor) -> Iterator[None]:
        self.calls += 1
        self.bytes += tensor.nbytes
        try:
            yield
        except RuntimeError as error:
            raise self.lost(error) from error

    def lost(self, error: BaseException) -> RankError:
        """What to raise after a collective has failed."""
        return RankError(
            f"rank {self.rank} of {self.size} has lost the others ({reason_of(error)}): a process "
            "has ended or does not answer in time; start all of them again from the last checkpoint"
        )
