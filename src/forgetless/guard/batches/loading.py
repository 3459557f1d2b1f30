"""Samples from a user's loader: a random choice, or all of them batch by batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from forgetless.guard.batches.samples import Part, StoredSamples, Unpack, unpacked
from forgetless.support.validation import ConfigError, DataError, NoSamplesError


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
        aside: filled with a choice of its own by `set_aside`, or by a pass over all samples if
            there is no indexed dataset.
    """

    def __init__(
        self,
        loader: Any,
        unpack: Unpack | None,
        generator: torch.Generator,
        aside: "Reservoir | None" = None,
    ) -> None:
        if not isinstance(loader, Iterable):
            raise ConfigError(f"a loader must be iterable, not {type(loader).__name__}")
        self.loader: Iterable[Any] = [loader] if _is_batch(loader) else loader
        self.unpack = unpack
        self.generator = generator
        self._aside = aside or Reservoir(0, generator)
        self._all: list[Part] | None = None
        self._begun: Iterator[Part] | None = None
        self._seen = 0

    def batches(self) -> Iterator[Part]:
        """All samples, batch by batch; those of an iterator are stored for the next time."""
        if self._aside.complete or self.dataset is not None:
            yield from self._pass()
            return
        self._aside.parts, self._aside.seen = [], 0  # an earlier pass may have been broken off
        for part in self._pass():
            self._aside.add(part)
            yield part
        self._aside.complete = True

    def set_aside(self) -> StoredSamples:
        """The samples set aside, which are read now unless a pass over all has met them."""
        aside = self._aside
        if self.dataset is not None:
            return self._indexed(aside.count, aside.generator)
        if not aside.complete:
            for _ in self.batches():
                pass
        return _stacked(aside.parts)

    def _pass(self) -> Iterator[Part]:
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
        if not len(index):
            return
        if type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate:
            # At once: one after the other they take as long as a small model's training on them.
            yield unpacked([t[list(index)] for t in loader.dataset.tensors], self.unpack)
        else:
            some = Subset(loader.dataset, list(index))
            for batch in DataLoader(some, loader.batch_size, collate_fn=loader.collate_fn):
                yield unpacked(batch, self.unpack)

    @property
    def known_size(self) -> int | None:
        """The size, if it can be had without a pass over data that are not in memory."""
        in_memory = isinstance(self.loader, list)
        return self.size if in_memory or self.dataset is not None else None

    def few(self, count: int) -> Part:
        """The first samples, which draws no random number where there is an indexed dataset."""
        if self.dataset is None:
            first = self.first()
        else:
            first = next(self.at(range(min(count, len(self.dataset)))), None)
        if first is None:
            raise NoSamplesError("the loader has no samples")
        return first.mapped(lambda t: t[:count])

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
        if self.dataset is not None:
            return self._indexed(count, self.generator)
        chosen = Reservoir(count, self.generator)
        for part in self.batches():
            chosen.add(part)
        return _stacked(chosen.parts)

    def _indexed(self, count: int, generator: torch.Generator) -> StoredSamples:
        """A random choice of the indexed dataset's samples."""
        index = torch.randperm(len(self.dataset), generator=generator)[:count]
        return _stacked(list(self.at(index.tolist())))


@final
class Reservoir:
    """Reservoir sampling: equal chances in one pass that stores no more than `count` samples.

    Attributes:
        parts: the samples, one each.
        seen: how many there were to choose from.
        complete: whether that was all of the data; set by whoever reads it.
    """

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.count = count
        self.generator = generator
        self.parts: list[Part] = []
        self.seen = 0
        self.complete = count == 0

    def add(self, part: Part) -> None:
        """Let these samples take their chances."""
        n = len(part)
        # Sample number s, from 1, takes a random one of s places, if that is below `count`.
        chances = torch.rand(n, dtype=torch.float64, generator=self.generator)
        places = (chances * torch.arange(self.seen + 1, self.seen + n + 1)).long().tolist()
        for i, place in enumerate(places):
            if len(self.parts) < self.count:
                self.parts.append(part.select(torch.tensor([i])))
            elif place < self.count:
                self.parts[place] = part.select(torch.tensor([i]))
        self.seen += n


def _stacked(parts: list[Part]) -> StoredSamples:
    if not parts:
        raise NoSamplesError("the loader has no samples")
    return StoredSamples.stacked(parts)


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
