"""Samples of a task whose data come to several processes, as if one of them had seen all."""

import hashlib
from collections.abc import Iterator
from typing import Any, final

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset

from forgetless.guard.batches.loading import TaskData, iterates_plainly
from forgetless.guard.batches.samples import Part, Remembered, Unpack, unpacked
from forgetless.support.collectives import Ranks
from forgetless.support.errors import DataError, ForgetlessError, NoSamplesError


@final
class SharedTaskData:
    """The training samples of one task, on every rank the same.

    A loader with a `DistributedSampler` is taken for what it is, a part of one dataset that all
    ranks can read: the samples are those that one process would choose. Any other loader either
    gives the same on every rank, or a part of the task on each; what was chosen tells.

    Arguments:
        loader, unpack, generator: as of `TaskData`.
        ranks: the processes; all must make the same calls.
    """

    def __init__(
        self, loader: Any, unpack: Unpack | None, generator: torch.Generator, ranks: Ranks
    ) -> None:
        self.ranks = ranks
        self.unpack = unpack
        self.generator = generator
        divided = iterates_plainly(loader) and type(loader.sampler) is DistributedSampler
        if divided and loader.batch_size is not None:
            loader = DataLoader(
                loader.dataset,
                loader.batch_size,
                collate_fn=loader.collate_fn,
                drop_last=loader.drop_last,
            )
        self.mine = TaskData(loader, unpack, generator)
        self._same: bool | None = None

    @property
    def size(self) -> int:
        """How many samples the task has."""
        size = self.mine.size
        return size if self._is_same() else int(self.ranks.sum(torch.tensor(size)))

    def batches(self) -> Iterator[Part]:
        """The part of this rank; of all ranks together, each sample once."""
        rank, ranks = self.ranks.rank, self.ranks.size
        if not self._is_same():
            yield from self.mine.batches()
            return
        dataset = self.mine._indexed()
        if dataset is not None and isinstance(self.mine.loader, DataLoader):
            yield from self._read(dataset, range(rank, self.mine.size, ranks))
            return
        for number, part in enumerate(self.mine.batches()):
            if number % ranks == rank:
                yield part

    def first(self) -> Part | None:
        """The first batch of this rank, which is not lost to who walks through the samples next."""
        return self.mine.first()

    def summed(self, total: Tensor) -> Tensor:
        """A sum over this rank's samples, made one over all."""
        return self.ranks.sum(total)

    def draw(self, count: int) -> Remembered:
        """A random choice without replacement, all of them if there are no more than `count`."""
        mine = self._drawn(count)
        same = self._agree(mine)
        # On from one state: a loader that is walked through uses as much as it has samples.
        self.generator.set_state(self.ranks.agreed(self.generator.get_state()))
        if same:
            if mine is None:
                raise NoSamplesError("the loader has no samples")
            return mine
        return self._merged(mine, count)

    def _drawn(self, count: int) -> Remembered | None:
        """The choice of this rank, None if its loader is empty; what fails here fails on all."""
        failed, mine = "", None
        try:
            mine = self.mine.draw(count)
        except NoSamplesError:
            pass
        except ForgetlessError as error:
            failed = str(error)
        told = self.ranks.gathered(_bytes(failed.encode()))
        for rank, message in enumerate(told):
            if len(message):
                raise DataError(f"rank {rank}: {bytes(message.tolist()).decode()}")
        return mine

    def _merged(self, mine: Remembered | None, count: int) -> Remembered:
        """A choice from all ranks' choices, every sample of theirs with the same chance."""
        size = 0 if mine is None else self.mine.size
        sizes = [int(s) for s in self.ranks.gathered(torch.tensor([size]))]
        everything = self.ranks.gathered(_bytes(b"" if mine is None else save(_named(mine))))
        chosen = torch.randperm(sum(sizes), generator=self.generator)[:count]
        parts: list[Part] = []
        start = 0
        for size, of_rank in zip(sizes, everything, strict=True):
            wanted = int(((chosen >= start) & (chosen < start + size)).sum())
            start += size
            if wanted:
                theirs = Remembered.restore([load(of_rank.numpy().tobytes())])
                index = torch.randperm(len(theirs), generator=self.generator)[:wanted]
                parts += theirs.select(index.sort().values).parts
        return Remembered.stacked(parts)

    def _is_same(self) -> bool:
        """Whether every rank's loader gives the same data, by a few samples of it."""
        if self._same is None:
            dataset = self.mine._indexed()
            if dataset is None:
                first = next(iter(self.mine.batches()), None)
            else:
                n = len(dataset)
                first = next(self._read(dataset, sorted({0, n // 2, n - 1}) if n else ()), None)
            self._same = self._agree(None if first is None else Remembered((first,)))
        return self._same

    def _agree(self, samples: Remembered | None) -> bool:
        """Whether all ranks have the same samples."""
        digest = hashlib.sha256(b"" if samples is None else save(_named(samples))).digest()
        found = self.ranks.gathered(_bytes(digest))
        return all(torch.equal(one, found[0]) for one in found)

    def _read(self, dataset: Any, index: Any) -> Iterator[Part]:
        loader = self.mine.loader
        if len(index) == 0 or not isinstance(loader, DataLoader):
            return
        some = DataLoader(
            Subset(dataset, list(index)), loader.batch_size, collate_fn=loader.collate_fn
        )
        for batch in some:
            yield unpacked(batch, self.unpack)


def _named(samples: Remembered) -> dict[str, Tensor]:
    return {name: t.cpu().contiguous() for name, t in samples.tensors().items()}


def _bytes(data: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.zeros(0, dtype=torch.uint8)
    )
