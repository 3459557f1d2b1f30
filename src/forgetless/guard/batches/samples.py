"""Batches of any format as samples that a network can be run on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import torch
from torch import Tensor

from forgetless.methods.base import check_attached
from forgetless.support.validation import ConfigError, DataError, require

# From a batch to the model's inputs (a tensor, a tuple or a dict of them) and the target.
Unpack = Callable[[Any], tuple[Any, Tensor | None]]

_TARGETS = ("labels", "label", "targets", "target", "y")


@final
@dataclass(frozen=True)
class Part:
    """Samples of one shape.

    Arguments:
        args, kwargs: the model's arguments, tensors (n, *).
        target: the target, (n, *), or None.
        extra: what a method attached to the samples, (n, *) each.
    """

    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor]
    target: Tensor | None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.named().values())))

    def named(self) -> dict[str, Tensor]:
        """Every tensor by name: `arg0`, `kwarg.mask`, `target`."""
        tensors = {f"arg{i}": value for i, value in enumerate(self.args)}
        tensors |= {f"kwarg.{key}": value for key, value in self.kwargs.items()}
        tensors |= {f"extra.{key}": value for key, value in self.extra.items()}
        return tensors if self.target is None else {**tensors, "target": self.target}

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> Self:
        """The inverse of `named`."""
        args = tuple(named[f"arg{i}"] for i in range(len(named)) if f"arg{i}" in named)
        kwargs = {key[6:]: value for key, value in named.items() if key.startswith("kwarg.")}
        extra = {key[6:]: value for key, value in named.items() if key.startswith("extra.")}
        return cls(args, kwargs, named.get("target"), extra)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Every tensor changed."""
        return type(self).of({name: change(value) for name, value in self.named().items()})

    def select(self, index: Tensor) -> Self:
        """The samples at index (m,)."""
        return self.mapped(lambda t: t[index.to(t.device)])

    @property
    def kind(self) -> frozenset[tuple[str, torch.Size, torch.dtype]]:
        """Parts of one kind can be concatenated."""
        return frozenset((name, t.shape[1:], t.dtype) for name, t in self.named().items())


@final
@dataclass(frozen=True)
class StoredSamples:
    """Samples of any shapes, in parts of one shape each."""

    parts: tuple[Part, ...]

    @classmethod
    def stacked(cls, parts: Iterable[Part]) -> Self:
        """Parts of one shape concatenated."""
        groups: dict[object, list[Part]] = {}
        for part in parts:
            groups.setdefault(part.kind, []).append(part)
        return cls(tuple(_concatenated(group) for group in groups.values()))

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __add__(self, other: Self) -> Self:
        return self.stacked((*self.parts, *other.parts))

    def select(self, index: Tensor) -> Self:
        """The samples at index (m,) or (1, m); those of one shape stay together."""
        index = index.flatten()
        chosen, start = [], 0
        for part in self.parts:
            mine = index[(index >= start) & (index < start + len(part))] - start
            start += len(part)
            if len(mine):
                chosen.append(part.select(mine))
        return type(self)(tuple(chosen))

    @property
    def extra(self) -> dict[str, Tensor]:
        """The tensors that a method attached to the samples, (1, n, *) each."""
        if len(self.parts) == 1:
            return {n: t.unsqueeze(0) for n, t in self.parts[0].extra.items()}
        names = self.parts[0].extra if self.parts else ()
        return {n: torch.cat([p.extra[n] for p in self.parts]).unsqueeze(0) for n in names}

    def attach(self, **tensors: Tensor) -> Self:
        """The same samples with more tensors (1, n, *), which travel with them."""
        lengths = [len(part) for part in self.parts]
        more: list[dict[str, Tensor]] = [{} for _ in lengths]
        for name, tensor in tensors.items():
            check_attached(name, tensor, (1, len(self)))
            for named, rows in zip(more, tensor[0].split(lengths), strict=True):
                named[name] = rows
        pairs = zip(self.parts, more, strict=True)
        return type(self)(tuple(replace(p, extra={**p.extra, **new}) for p, new in pairs))

    def tensors(self, seed: int = 0) -> dict[str, Tensor]:
        """Every tensor, by part and name."""
        return {
            f"{i}:{name}": tensor
            for i, part in enumerate(self.parts)
            for name, tensor in part.named().items()
        }

    @classmethod
    def restore(cls, of_seeds: Sequence[Mapping[str, Tensor]]) -> Self:
        """The inverse of `tensors`."""
        named: dict[int, dict[str, Tensor]] = {}
        for key, tensor in of_seeds[0].items():
            number, _, name = key.partition(":")
            named.setdefault(int(number), {})[name] = tensor
        return cls(tuple(Part.of(named[i]) for i in sorted(named)))


def _concatenated(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    first, *others = (part.named() for part in parts)
    return Part.of(
        {n: torch.cat([t, *(one[n].to(t.device) for one in others)]) for n, t in first.items()}
    )


def unpacked(batch: Any, unpack: Unpack | None) -> Part:
    """The samples of a batch.

    Without `unpack`: a tensor is the input; the second of a pair is the target; in a dict the
    target is called labels, label, targets, target or y, and the other tensors are the model's
    keyword arguments.
    """
    taken = (unpack or _by_format)(batch)
    if not isinstance(taken, tuple | list) or len(taken) != 2:
        raise ConfigError(
            f"unpack= must return the model's inputs and the target (or None), two things, not "
            f"a {type(taken).__name__}"
        )
    inputs, target = taken
    if isinstance(inputs, Tensor):
        part = Part((inputs,), {}, target)
    elif isinstance(inputs, Mapping):
        part = Part((), {k: v for k, v in inputs.items() if isinstance(v, Tensor)}, target)
    elif isinstance(inputs, tuple | list):
        part = Part(tuple(inputs), {}, target)
    else:
        raise ConfigError(
            f"a batch's inputs must be a tensor, a tuple or a dict of tensors, not "
            f"{type(inputs).__name__}; say with unpack= how to take a batch apart"
        )
    named = part.named()
    if not part.args and not part.kwargs:
        raise ConfigError("a batch has no tensor to run the model on; unpack= says where it is")
    for name, tensor in named.items():
        good = isinstance(tensor, Tensor) and tensor.dim() >= 1
        kind = f"{name} of type {type(tensor).__name__}"
        require(good, "a batch", kind, "made of tensors with a leading dimension of samples")
    sizes = {len(tensor) for tensor in named.values()}
    require(len(sizes) == 1, "a batch", f"of sizes {sorted(sizes)}", "of equally many samples each")
    if sizes == {0}:
        raise DataError("a batch has no samples")
    # Autograd cannot use a tensor made in inference mode.
    return part.mapped(lambda t: t.clone() if t.is_inference() else t.detach())


def _by_format(batch: Any) -> tuple[Any, Tensor | None]:
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Mapping):
        target = next((key for key in _TARGETS if key in batch), None)
        return {k: v for k, v in batch.items() if k != target}, batch.get(target)
    if isinstance(batch, tuple | list) and len(batch) in (1, 2):
        return batch[0], batch[1] if len(batch) == 2 else None
    what = f"of type {type(batch).__name__}"
    if isinstance(batch, tuple | list):
        what = f"a {type(batch).__name__} of {len(batch)}"
    raise ConfigError(
        f"a batch is {what}: say with unpack= how to take it apart, for example "
        "unpack=lambda batch: (batch[0], batch[1]) for inputs and target"
    )
