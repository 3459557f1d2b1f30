"""The rows of φ, a chunk of samples at a time, cached within a memory budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, final

import torch
from torch import Tensor

from forgetless.support.errors import ConfigError
from forgetless.support.memory import free_memory, total_memory
from forgetless.tangent.blocks import Block
from forgetless.tangent.capture import Captured, SampleLayout, capture
from forgetless.tangent.evaluation import Evaluation
from forgetless.tangent.factors import cuts, distinct_bytes

_BUDGET = 1 << 30  # bytes of captured chunks that are cached
_PROBE = 16  # samples that show how much memory one takes
# Most samples at once: these fit in a CPU's cache, or keep a GPU busy.
_CHUNK = {"cpu": 512, "cuda": 8192}
_SLOWNESS = {"unused": 0, "vmap": 2, "loop": 3}  # 1: a layer's rule


def require_bytes(what: str, needed: int, like: Tensor) -> None:
    """Raise if so many bytes can never fit on the device of `like`."""
    # What others hold of main memory they may give back.
    available = free_memory(like.device) if like.is_cuda else total_memory(like.device)
    if needed > available:
        raise ConfigError(
            f"{what} would take {needed:,} bytes and {like.device} has {available:,.0f}: "
            "take fewer samples, or use phi @ v and phi.T @ u, which do not build it"
        )


@final
@dataclass(frozen=True)
class Piece:
    """Some rows of φ (one scalar of each sample of a chunk), with a block for each parameter."""

    rows: slice
    blocks: Mapping[str, Block]


class FeatureSource(Protocol):
    """The rows of φ, a chunk at a time."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, in the order of the columns."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Their numbers of columns."""

    @property
    def like(self) -> Tensor:
        """An empty tensor of the rows' dtype and device."""

    @property
    def height(self) -> int:
        """Number of rows."""

    @property
    def rules(self) -> Mapping[str, str]:
        """Parameter → how its gradients are computed or stored."""

    def __len__(self) -> int:
        """Number of chunks."""

    def pieces(self, index: int) -> Sequence[Piece]:
        """The pieces of one chunk."""


@final
@dataclass(frozen=True)
class Known:
    """What is known of samples of this network, scalar and shape from earlier ones.

    Arguments:
        sample_bytes: memory per sample.
        layout: their dimension in each layer, if it must be the same; None to find out.
    """

    sample_bytes: int
    layout: SampleLayout | None = None


@final
class Chunks:
    """The rows of φ for the samples of some evaluations, captured a chunk at a time.

    Arguments:
        evaluations: the same scalars of the same network, each for samples of one shape.
        chunk: samples that go through the network at once; None for as many as fit well.
        known: from similar samples; None measures a few.
    """

    def __init__(
        self, evaluations: Sequence[Evaluation], chunk: int | None, known: Known | None = None
    ) -> None:
        self.names = evaluations[0].names
        values = [evaluations[0].values[name] for name in self.names]
        self.sizes = tuple(value.numel() for value in values)
        self.like = torch.cat([value.new_empty(0) for value in values])
        self.kept: dict[int, list[Piece]] = {}
        self.kept_bytes = 0
        self.rules: dict[str, str] = {}
        free = int(free_memory(self.like.device)) if self.like.is_cuda else 0
        self.budget = max(_BUDGET, free // 4)
        self._layout = None if known is None else known.layout
        if chunk is None and known is not None:
            chunk = self._fitting(known.sample_bytes)
        size = min(evaluations[0].n, _PROBE if chunk is None else chunk)
        first = self._capture(evaluations[0].select(slice(0, size)))
        self.per_sample = len(first.blocks)  # K
        self.known = Known(max(1, _bytes(first) // size), first.layout)
        if chunk is None and size < max(evaluation.n for evaluation in evaluations):
            chunk = self._fitting(self.known.sample_bytes)
        self.parts = [
            evaluation.select(some)
            for evaluation in evaluations
            for some in cuts(evaluation.n, chunk or size)
        ]
        self.starts = list(accumulate((part.n for part in self.parts), initial=0))
        if self.parts[0].n == size:
            self._keep(0, first)

    def _fitting(self, sample_bytes: int) -> int:
        """How many samples fit well through the network at once."""
        most = _CHUNK.get(self.like.device.type, _CHUNK["cpu"])
        return max(1, min(most, self.budget // 8 // sample_bytes))

    @property
    def height(self) -> int:
        """Number of rows, n · K."""
        return self.starts[-1] * self.per_sample

    def __len__(self) -> int:
        return len(self.parts)

    def pieces(self, index: int) -> list[Piece]:
        """The K pieces of one chunk."""
        if index in self.kept:
            return self.kept[index]
        return self._keep(index, self._capture(self.parts[index]))

    def _capture(self, part: Evaluation) -> Captured:
        fallen = frozenset(name for name, rule in self.rules.items() if rule in ("vmap", "loop"))
        captured = capture(part, fallen, self._layout)
        for name, rule in captured.rules.items():
            # Report the slowest rule among the chunks.
            before = self.rules.get(name, "unused")
            if _SLOWNESS.get(before, 1) <= _SLOWNESS.get(rule, 1):
                self.rules[name] = rule
        return captured

    def _keep(self, index: int, captured: Captured) -> list[Piece]:
        start, stop, count = self.starts[index], self.starts[index + 1], len(captured.blocks)
        if count != self.per_sample:
            raise ConfigError(
                f"every sample must have as many scalars as the first, {self.per_sample}, "
                f"not {count}"
            )
        pieces = [
            Piece(slice(start * count + k, stop * count, count), blocks)
            for k, blocks in enumerate(captured.blocks)
        ]
        used = _bytes(captured)
        if self.kept_bytes + used <= self.budget:
            self.kept[index] = pieces
            self.kept_bytes += used
        return pieces


def _bytes(captured: Captured) -> int:
    blocks = (block for piece in captured.blocks for block in piece.values())
    return distinct_bytes(t for block in blocks for t in block.tensors())
