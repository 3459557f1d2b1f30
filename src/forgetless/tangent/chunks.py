"""The captured chunks of φ's rows: kept while they fit a budget, otherwise captured again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from forgetless.tangent.blocks import Block
from forgetless.tangent.capture import Captured, capture
from forgetless.tangent.factors import cuts, distinct_bytes
from forgetless.tangent.problem import Problem

_BUDGET = 1 << 30  # bytes of captured chunks that are kept
_PROBE = 16  # samples that show how much memory one takes
# Samples at once if memory allows: what stays in a CPU's cache, and what keeps a GPU busy.
_CHUNK = {"cpu": 512, "cuda": 8192}
_SLOWNESS = {"unused": 0, "vmap": 2, "loop": 3}  # 1: a layer's rule


@final
@dataclass(frozen=True)
class Piece:
    """Some rows of φ: one scalar of each sample of a chunk, every parameter a block."""

    rows: slice
    blocks: Mapping[str, Block]


@final
class Chunks:
    """Walks over the samples of a problem, a chunk at a time.

    Arguments:
        problem: n samples, K scalars each.
        chunk: samples that go through the network at once; None: as many as fit well.
    """

    def __init__(self, problem: Problem, chunk: int | None) -> None:
        self.problem = problem
        self.kept: dict[int, list[Piece]] = {}
        self.kept_bytes = 0
        self.rules: dict[str, str] = {}
        size = min(problem.n, _PROBE if chunk is None else chunk)
        first = self._capture(slice(0, size))
        self.per_sample = len(first.blocks)  # K
        if chunk is None and size < problem.n:
            bytes_each = max(1, _bytes(first) // size)
            at_once = _CHUNK.get(_device(problem), _CHUNK["cpu"])
            self.size = max(1, min(at_once, _BUDGET // 8 // bytes_each))
        else:
            self.size = size
        self.samples = list(cuts(problem.n, self.size))
        if self.size == size:
            self._keep(0, first)

    def __len__(self) -> int:
        return len(self.samples)

    def pieces(self, index: int) -> list[Piece]:
        """The K pieces of one chunk."""
        if index in self.kept:
            return self.kept[index]
        return self._keep(index, self._capture(self.samples[index]))

    def __iter__(self) -> Iterator[Piece]:
        """All pieces."""
        for index in range(len(self)):
            yield from self.pieces(index)

    def _capture(self, samples: slice) -> Captured:
        fallen = frozenset(name for name, rule in self.rules.items() if rule in ("vmap", "loop"))
        captured = capture(self.problem.select(samples), fallen)
        for name, rule in captured.rules.items():
            # Of several chunks the report is the slowest way that was taken.
            before = self.rules.get(name, "unused")
            if _SLOWNESS.get(before, 1) <= _SLOWNESS.get(rule, 1):
                self.rules[name] = rule
        return captured

    def _keep(self, index: int, captured: Captured) -> list[Piece]:
        samples, count = self.samples[index], len(captured.blocks)
        pieces = [
            Piece(slice(samples.start * count + k, samples.stop * count, count), blocks)
            for k, blocks in enumerate(captured.blocks)
        ]
        used = _bytes(captured)
        if self.kept_bytes + used <= _BUDGET:
            self.kept[index] = pieces
            self.kept_bytes += used
        return pieces


def _bytes(captured: Captured) -> int:
    blocks = (block for of in captured.blocks for block in of.values())
    return distinct_bytes(t for block in blocks for t in block.tensors())


def _device(problem: Problem) -> str:
    return next(iter(problem.values.values())).device.type
