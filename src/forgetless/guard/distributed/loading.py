"""Samples of a task whose data are spread over processes, as if one process had seen all."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from forgetless.guard.batches.loading import Reservoir, TaskData, iterates_plainly
from forgetless.guard.batches.samples import Part, StoredSamples, Unpack
from forgetless.support.collectives import Ranks
from forgetless.support.validation import DataError, ForgetlessError, NoSamplesError


@final
class SharedTaskData:
    """The training samples of one task, the same on every rank.

    A loader with a `DistributedSampler` is part of one dataset that all ranks can read: the samples
    are those that one process would choose. Any other loader gives either the same samples on
    every rank or a part of the task on each, which a comparison of the samples tells.

    Arguments:
        loader, unpack, generator: as of `TaskData`.
        ranks: the processes; all must make the same calls.
        aside: as of `TaskData`, the same samples on every rank.
    """

    def __init__(
        self,
        loader: Any,
        unpack: Unpack | None,
        generator: torch.Generator,
        ranks: Ranks,
        aside: Reservoir | None = None,
    ) -> None:
        self.ranks = ranks
        self.generator = generator
        self._aside = aside or Reservoir(0, generator)
        divided = iterates_plainly(loader) and type(loader.sampler) is DistributedSampler
        if divided and loader.batch_size is not None:
            loader = DataLoader(
                loader.dataset,
                loader.batch_size,
                collate_fn=loader.collate_fn,
                drop_last=loader.drop_last,
            )
        self.local = TaskData(loader, unpack, generator, self._aside)
        self._same: bool | None = None

    @property
    def size(self) -> int:
        """How many samples the task has."""
        size = self.local.size
        return size if self._is_same() else int(self.ranks.sum(torch.tensor(size)))

    def batches(self) -> Iterator[Part]:
        """The rank's share of the samples; all ranks together have each sample once."""
        rank, ranks = self.ranks.rank, self.ranks.size
        if not self._is_same():
            yield from self.local.batches()
        elif self.local.dataset is not None:
            yield from self.local.at(range(rank, self.local.size, ranks))
        else:
            for number, part in enumerate(self.local.batches()):
                if number % ranks == rank:
                    yield part

    def all_parts(self) -> Iterator[Part]:
        """All of the task's samples, on every rank; they are in memory at once."""
        return iter(self.draw(self.size).parts)

    def first(self) -> Part | None:
        """The first batch of this rank."""
        return self.local.first()

    def summed(self, total: Tensor) -> Tensor:
        """The sum over all ranks of a sum over this rank's samples."""
        return self.ranks.sum(total)

    def draw(self, count: int) -> StoredSamples:
        """A random choice without replacement, all samples if there are no more than `count`."""
        return self._joined(lambda: self.local.draw(count), count, self.generator)

    def set_aside(self) -> StoredSamples:
        """The samples set aside of all ranks' data."""
        return self._joined(self.local.set_aside, self._aside.count, self._aside.generator)

    def _joined(
        self, choose: Callable[[], StoredSamples], count: int, generator: torch.Generator
    ) -> StoredSamples:
        """One choice of `count` samples from those that `choose` takes on each rank."""
        mine = self._locally(choose)
        same = self._agree(mine)
        # Reading a loader to its end uses as many random numbers as it has samples.
        generator.set_state(self.ranks.broadcast(generator.get_state()))
        if same:
            if mine is None:
                raise NoSamplesError("the loader has no samples")
            return mine
        return self._merged(mine, count, generator)

    def _locally(self, choose: Callable[[], StoredSamples]) -> StoredSamples | None:
        """The rank's choice, None if its loader is empty; an error here is raised on all ranks."""
        failed, mine = "", None
        try:
            mine = choose()
        except NoSamplesError:
            pass
        except ForgetlessError as error:
            failed = str(error)
        messages = self.ranks.gather(_bytes(failed.encode()))
        for rank, message in enumerate(messages):
            if len(message):
                raise DataError(f"rank {rank}: {bytes(message.tolist()).decode()}")
        return mine

    def _merged(
        self, mine: StoredSamples | None, count: int, generator: torch.Generator
    ) -> StoredSamples:
        """A choice from all ranks' choices with equal chances for every sample."""
        size = 0 if mine is None else self.local.size
        sizes = [int(s) for s in self.ranks.gather(torch.tensor([size]))]
        choices = self.ranks.gather(_bytes(_serialised(mine)))
        chosen = torch.randperm(sum(sizes), generator=generator)[:count]
        parts: list[Part] = []
        start = 0
        for size, of_rank in zip(sizes, choices, strict=True):
            wanted = int(((chosen >= start) & (chosen < start + size)).sum())
            start += size
            if wanted:
                theirs = StoredSamples.restore([load(of_rank.numpy().tobytes())])
                index = torch.randperm(len(theirs), generator=generator)[:wanted]
                parts += theirs.select(index.sort().values).parts
        return StoredSamples.stacked(parts)

    def _is_same(self) -> bool:
        """Whether every rank's loader gives the same data, judged by a few samples."""
        if self._same is None:
            dataset = self.local.dataset
            if dataset is None:
                few = self.local.batches()
            else:
                n = len(dataset)
                few = self.local.at(sorted({0, n // 2, n - 1}) if n else ())
            first = next(few, None)
            self._same = self._agree(None if first is None else StoredSamples((first,)))
        return self._same

    def _agree(self, samples: StoredSamples | None) -> bool:
        """Whether all ranks have the same samples."""
        found = self.ranks.gather(_bytes(hashlib.sha256(_serialised(samples)).digest()))
        return all(torch.equal(one, found[0]) for one in found)


def _serialised(samples: StoredSamples | None) -> bytes:
    tensors = {} if samples is None else samples.tensors()
    found: bytes = save({n: t.cpu().contiguous() for n, t in tensors.items()}) if tensors else b""
    return found


def _bytes(data: bytes) -> Tensor:
    empty = torch.zeros(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else empty
