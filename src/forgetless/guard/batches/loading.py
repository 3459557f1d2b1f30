"""Samples out of a user's loader: a random choice, or all of them one batch after another."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from forgetless.guard.batches.samples import Part, Remembered, Unpack, unpacked
from forgetless.support.errors import ConfigError, DataError, NoSamplesError


@final
class TaskData:
    """The training samples of one task.

    Of a plain `DataLoader` over a dataset with an index only the chosen samples are read. Anything
    else, such as a loader or a sampler with an iteration of its own, is walked through once,
    keeping a sample of it.

    Arguments:
        loader: an iterable of batches, or one batch.
        unpack: from a batch to inputs and target.
        generator: of random choices.
    """

    def __init__(self, loader: Any, unpack: Unpack | None, generator: torch.Generator) -> None:
        one_batch = isinstance(loader, Tensor | Mapping) or (
            isinstance(loader, tuple) and bool(loader) and isinstance(loader[0], Tensor)
        )
        one_batch = one_batch or _is_collated(loader)
        if not one_batch and not isinstance(loader, Iterable):
            raise ConfigError(f"a loader must be iterable, not {type(loader).__name__}")
        self.loader: Iterable[Any] = [loader] if one_batch else loader
        self.unpack = unpack
        self.generator = generator
        self._all: list[Part] | None = None
        self._begun: Iterator[Part] | None = None
        self._seen = 0

    def batches(self) -> Iterator[Part]:
        """All samples, batch after batch; an iterator that can be walked only once is kept."""
        if self._all is None and isinstance(self.loader, Iterator):
            self._all = [unpacked(batch, self.unpack) for batch in self.loader]
        if self._all is not None:
            yield from self._all
            return
        walk, self._begun = self._begun or self._walk(), None
        count = 0
        for part in walk:
            count += len(part)
            yield part
        if self._seen and not count:
            raise DataError(
                "the loader can be walked through only once, and this takes more: give a list of "
                "its batches"
            )
        self._seen = count

    def first(self) -> Part | None:
        """The first batch, which is not lost to who walks through the samples next."""
        if isinstance(self.loader, Iterator) or self._indexed() is not None:
            return next(self.batches(), None)
        walk = self._walk()
        first = next(walk, None)
        self._begun = None if first is None else chain([first], walk)
        return first

    def _walk(self) -> Iterator[Part]:
        return (unpacked(batch, self.unpack) for batch in self.loader)

    @property
    def size(self) -> int:
        """How many samples the loader gives."""
        dataset = self._indexed()
        if dataset is None or not isinstance(self.loader, DataLoader):
            return sum(len(part) for part in self.batches())
        count = len(dataset)
        return count - count % (self.loader.batch_size or 1) if self.loader.drop_last else count

    def summed(self, total: Tensor) -> Tensor:
        """A sum over the samples of `batches`, which are all."""
        return total

    def draw(self, count: int) -> Remembered:
        """A random choice without replacement, all of them if there are no more than `count`."""
        dataset = self._indexed()
        parts = self._walked(count) if dataset is None else self._chosen(dataset, count)
        if not parts:
            raise NoSamplesError("the loader has no samples")
        return Remembered.stacked(parts)

    def _indexed(self) -> Any:
        """The loader's dataset, if the loader gives its samples as they are and leaves none out."""
        loader: Any = self.loader
        if not iterates_plainly(loader) or isinstance(loader.dataset, IterableDataset):
            return None
        dataset = loader.dataset
        plain = type(loader.sampler) in (RandomSampler, SequentialSampler)
        batched = loader.batch_size is not None
        whole = plain and getattr(loader.sampler, "num_samples", None) in (None, len(dataset))
        return dataset if plain and whole and batched else None

    def _chosen(self, dataset: Any, count: int) -> list[Part]:
        index = torch.randperm(len(dataset), generator=self.generator)[:count].tolist()
        if not index or not isinstance(self.loader, DataLoader):
            return []
        loader = DataLoader(
            Subset(dataset, index),
            batch_size=self.loader.batch_size,
            collate_fn=self.loader.collate_fn,
        )
        return [unpacked(batch, self.unpack) for batch in loader]

    def _walked(self, count: int) -> list[Part]:
        """Reservoir sampling: every sample has the same chance, and only `count` are kept."""
        kept: list[Part] = []
        seen = 0
        for part in self.batches():
            here = len(part)
            # Sample number s, from 1, takes a random one of s places, if that is among the first.
            chances = torch.rand(here, dtype=torch.float64, generator=self.generator)
            places = (chances * torch.arange(seen + 1, seen + here + 1)).long().tolist()
            for i, place in enumerate(places):
                if len(kept) < count:
                    kept.append(part.select(torch.tensor([i])))
                elif place < count:
                    kept[place] = part.select(torch.tensor([i]))
            seen += here
        return kept


def iterates_plainly(loader: Any) -> bool:
    """Whether it is a `DataLoader` that gives what its sampler chooses of its dataset.

    Who writes an iteration of their own may give other samples, or change them.
    """
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def _is_collated(loader: Any) -> bool:
    """Whether it is a batch as a `DataLoader` gives it: a list of tensors that differ in kind."""
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
