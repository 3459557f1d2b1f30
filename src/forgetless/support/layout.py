"""The columns of a flat weight vector that belong to each parameter."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import final

import torch
from torch import Tensor


def is_under(name: str, beginnings: Iterable[str]) -> bool:
    """Whether a parameter's name is, or begins with, one of these, in whole parts.

    "fc1" and "fc1." are the beginning of "fc1.weight", not of "fc10.weight".
    """
    return any(f"{name}.".startswith(f"{one.removesuffix('.')}.") for one in beginnings)


@final
@dataclass(frozen=True)
class ParameterSlice:
    """The indices start … stop − 1 of one dimension of a parameter.

    Arguments:
        shape: of the whole parameter.
        dim: the dimension that is cut.
        start, stop: range of indices in this slice.
    """

    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int

    @property
    def shape_here(self) -> tuple[int, ...]:
        """Shape of the slice."""
        here = list(self.shape)
        here[self.dim] = self.stop - self.start
        return tuple(here)

    @property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape_here)

    def of(self, whole: Tensor) -> Tensor:
        """The slice's columns (n, size) of rows (n, entries of the whole parameter)."""
        shaped: Tensor = whole.unflatten(1, self.shape)
        return shaped.narrow(1 + self.dim, self.start, self.stop - self.start).flatten(1)


@final
@dataclass(frozen=True)
class Layout:
    """Where in a vector (…, p) each parameter lies, in the order of `shapes`.

    Arguments:
        shapes: parameter → its shape.
        slices: parameter → the slice of it that is here, for a model that is sharded.
    """

    shapes: Mapping[str, tuple[int, ...]]
    slices: Mapping[str, ParameterSlice] = field(default_factory=dict)

    @cached_property
    def columns(self) -> dict[str, slice]:
        """Parameter → its columns."""
        ends = accumulate(self._sizes)
        pairs = zip(self.shapes, zip(ends, self._sizes, strict=True), strict=True)
        return {name: slice(end - size, end) for name, (end, size) in pairs}

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter → its shape, also where only a slice of it is here."""
        own = self.slices
        return {n: own[n].shape if n in own else shape for n, shape in self.shapes.items()}

    @property
    def size(self) -> int:
        """p."""
        return sum(self._sizes)

    @cached_property
    def _sizes(self) -> list[int]:
        return [prod(shape) for shape in self.shapes.values()]

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of a vector (…, p) as a view (…, *shape)."""
        parts = vector.split(self._sizes, dim=-1)
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view((*part.shape[:-1], *shape)) for (name, shape), part in named}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The vector (…, p) of parts (…, *shape) by name; a missing part counts as zero."""
        some = next(iter(parts.items()))
        lead = some[1].shape[: some[1].dim() - len(self.shapes[some[0]])]
        columns = [
            parts[n].reshape(*lead, size) if n in parts else some[1].new_zeros(*lead, size)
            for n, size in zip(self.shapes, self._sizes, strict=True)
        ]
        return torch.cat(columns, dim=-1)


@final
@dataclass(frozen=True)
class Growth:
    """More weights in a network: further rows of parameters, and further parameters.

    Arguments:
        old: the layout before.
        new: that after, in which each old parameter's rows are the first.
    """

    old: Layout
    new: Layout

    def new_rows(self, name: str) -> int:
        """How many rows an old parameter gets."""
        shapes = self.old.shapes[name], self.new.shapes[name]
        before, after = (shape[0] if shape else 1 for shape in shapes)
        return after - before

    def spread(self, values: Tensor, onto: Tensor) -> Tensor:
        """`onto` (…, p') with values (…, p) at the old weights."""
        out = onto.clone()
        for name, some in self.old.columns.items():
            start = self.new.columns[name].start
            out[..., start : start + some.stop - some.start] = values[..., some]
        return out

    def padded(self, values: Tensor) -> Tensor:
        """Values (…, p) with zeros at the new weights, (…, p')."""
        return self.spread(values, values.new_zeros(*values.shape[:-1], self.new.size))
