"""Samples from a user's loader: a random choice, or all of them batch by batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from forgetless.guard.batches.samples import Part, StoredSamples, Unpack, unpacked
from forgetless.support.errors import ConfigError, DataError, NoSamplesError


@final
class TaskData:
    """The training samples of one task.

    From a plain `DataLoader` over an indexed dataset only the chosen samples are read. Any other
    iterable, such as a loader or sampler with its own iteration, is read once from start to end
    with reservoir sampling.

    Arguments:
        loader: an iterable of batches, or one batch.
        unpack: from a batch to inputs and target.
        generator: of random choices.
    """

    def __init__(self, loader: Any, unpack: Unpack | None, generator: torch.Generator) -> None:
        if not isinstance(loader, Iterable):
            raise ConfigError(f"a loader must be iterable, not {type(loader).__name__}")
        self.loader: Iterable[Any] = [loader] if _is_batch(loader) else loader
        self.unpack = unpack
        self.generator = generator
        self._all: list[Part] | None = None
        self._begun: Iterator[Part] | None = None
        self._seen = 0

    def batches(self) -> Iterator[Part]:
        """All samples, batch by batch; those of an iterator are stored for the next time."""
        if self._all is None and isinstance(self.loader, Iterator):
            self._all = list(self._read())
        if self._all is not None:
            yield from self._all
            return
        reading, self._begun = self._begun or self._read(), None
        count = 0
        for part in reading:
            count += len(part)
            yield part
        if self._seen and not count:
            raise DataError(
                "the loader can be walked through only once, and this takes more: give a list of "
                "its batches"
            )
        self._seen = count

    def all_parts(self) -> Iterator[Part]:
        """All of the task's samples, batch by batch."""
        return self.batches()

    def first(self) -> Part | None:
        """The first batch, which `batches` still gives if it can be read only once."""
        if isinstance(self.loader, Iterator) or self.dataset is not None:
            return next(self.batches(), None)
        reading = self._read()
        first = next(reading, None)
        self._begun = None if first is None else chain([first], reading)
        return first

    def _read(self) -> Iterator[Part]:
        return (unpacked(batch, self.unpack) for batch in self.loader)

    @property
    def dataset(self) -> Any:
        """The loader's indexed dataset if it gives all of its samples unchanged, otherwise None."""
        loader: Any = self.loader
        if not iterates_plainly(loader) or isinstance(loader.dataset, IterableDataset):
            return None
        plain = type(loader.sampler) in (RandomSampler, SequentialSampler)
        count = getattr(loader.sampler, "num_samples", None) if plain else None
        complete = plain and count in (None, len(loader.dataset))
        return loader.dataset if complete and loader.batch_size is not None else None

    def at(self, index: Sequence[int]) -> Iterator[Part]:
        """The indexed dataset's samples at index, batch by batch."""
        loader: Any = self.loader
        if len(index):
            some = Subset(loader.dataset, list(index))
            for batch in DataLoader(some, loader.batch_size, collate_fn=loader.collate_fn):
                yield unpacked(batch, self.unpack)

    @property
    def size(self) -> int:
        """How many samples the loader gives."""
        loader: Any = self.loader
        if self.dataset is None:
            return sum(len(part) for part in self.batches())
        count = len(self.dataset)
        return count - count % (loader.batch_size or 1) if loader.drop_last else count

    def summed(self, total: Tensor) -> Tensor:
        """A sum over the samples of `batches`, which are all of the task's."""
        return total

    def draw(self, count: int) -> StoredSamples:
        """A random choice without replacement, all samples if there are no more than `count`."""
        if self.dataset is None:
            parts = self._reservoir(count)
        else:
            index = torch.randperm(len(self.dataset), generator=self.generator)[:count]
            parts = list(self.at(index.tolist()))
        if not parts:
            raise NoSamplesError("the loader has no samples")
        return StoredSamples.stacked(parts)

    def _reservoir(self, count: int) -> list[Part]:
        """Reservoir sampling: equal chances in one pass that stores no more than `count`."""
        chosen: list[Part] = []
        seen = 0
        for part in self.batches():
            n = len(part)
            # Sample number s, from 1, takes a random one of s places, if that is below `count`.
            chances = torch.rand(n, dtype=torch.float64, generator=self.generator)
            places = (chances * torch.arange(seen + 1, seen + n + 1)).long().tolist()
            for i, place in enumerate(places):
                if len(chosen) < count:
                    chosen.append(part.select(torch.tensor([i])))
                elif place < count:
                    chosen[place] = part.select(torch.tensor([i]))
            seen += n
        return chosen


def iterates_plainly(loader: Any) -> bool:
    """Whether it is a `DataLoader` with torch's own iteration; others may change the samples."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def _is_batch(loader: Any) -> bool:
    """Whether it is one batch, among others a list of tensors as a `DataLoader` collates them."""
    if isinstance(loader, Tensor | Mapping):
        return True
    if isinstance(loader, tuple) and loader and isinstance(loader[0], Tensor):
        return True
    tensors = isinstance(loader, list) and all(isinstance(p, Tensor) and p.dim() for p in loader)
    if not tensors or len(loader) < 2 or len({len(part) for part in loader}) > 1:
        return False
    if len({(part.dim(), part.dtype) for part in loader}) > 1:
        return True
    if len(loader) == 2:
        raise ConfigError(
            "a list of two tensors of one kind may be one batch or two: give one as a tuple "
            "(inputs, target), two without a target as [(inputs,), (inputs,)]"
        )
    return False
