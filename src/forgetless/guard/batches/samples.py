"""Users' batches, whatever they look like, as samples that a network can be run on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor

from forgetless.support.errors import ConfigError, DataError, require

# From a batch to the model's inputs (a tensor, a tuple or a dict of them) and the target.
Unpack = Callable[[Any], tuple[Any, Tensor | None]]

_TARGETS = ("labels", "label", "targets", "target", "y")


@final
@dataclass(frozen=True)
class Part:
    """Samples of one shape.

    Arguments:
        args, kwargs: what the model is called with, tensors (n, *).
        target: what it should say, (n, *), or None.
    """

    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor]
    target: Tensor | None

    def __len__(self) -> int:
        return len(next(iter(self.named().values())))

    def named(self) -> dict[str, Tensor]:
        """Every tensor, by a name that says what it is."""
        tensors = {f"arg{i}": value for i, value in enumerate(self.args)}
        tensors |= {f"kwarg.{key}": value for key, value in self.kwargs.items()}
        return tensors if self.target is None else {**tensors, "target": self.target}

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> Self:
        """From what `named` gave."""
        args = tuple(named[f"arg{i}"] for i in range(len(named)) if f"arg{i}" in named)
        kwargs = {key[6:]: value for key, value in named.items() if key.startswith("kwarg.")}
        return cls(args, kwargs, named.get("target"))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Every tensor changed."""
        return type(self).of({name: change(value) for name, value in self.named().items()})

    def select(self, index: Tensor) -> Self:
        """Some of the samples, (m,)."""
        return self.mapped(lambda t: t[index.to(t.device)])

    def fits(self, other: Self) -> bool:
        """Whether the samples of both can be stacked."""
        mine, theirs = self.named(), other.named()
        return mine.keys() == theirs.keys() and all(
            value.shape[1:] == theirs[name].shape[1:] and value.dtype == theirs[name].dtype
            for name, value in mine.items()
        )


@final
@dataclass(frozen=True)
class Remembered:
    """Samples of any shapes, in parts of one shape each: what a method keeps of a user's data."""

    parts: tuple[Part, ...]

    @classmethod
    def stacked(cls, parts: Iterable[Part]) -> Self:
        """Parts that fit together made into one."""
        groups: list[list[Part]] = []
        for part in parts:
            group = next((g for g in groups if g[0].fits(part)), None)
            if group is None:
                groups.append([part])
            else:
                group.append(part)
        return cls(tuple(_stack(group) for group in groups))

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __add__(self, other: Self) -> Self:
        """Both, these first."""
        return self.stacked((*self.parts, *other.parts))

    def select(self, index: Tensor) -> Self:
        """Some of the samples, (m,)."""
        chosen, start = [], 0
        for part in self.parts:
            mine = index[(index >= start) & (index < start + len(part))] - start
            start += len(part)
            if len(mine):
                chosen.append(part.select(mine))
        return type(self)(tuple(chosen))

    def to(self, device: torch.device) -> Self:
        """The samples on a device."""
        return type(self)(tuple(part.mapped(lambda t: t.to(device)) for part in self.parts))

    def tensors(self, seed: int = 0) -> dict[str, Tensor]:
        """Every tensor, by part and name."""
        return {
            f"{i}:{name}": tensor
            for i, part in enumerate(self.parts)
            for name, tensor in part.named().items()
        }

    @classmethod
    def restore(cls, of_seeds: Sequence[Mapping[str, Tensor]]) -> Self:
        """From what `tensors` gave."""
        named: dict[int, dict[str, Tensor]] = {}
        for key, tensor in of_seeds[0].items():
            number, _, name = key.partition(":")
            named.setdefault(int(number), {})[name] = tensor
        return cls(tuple(Part.of(named[i]) for i in sorted(named)))


def _stack(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    several = [part.named() for part in parts]
    return Part.of({name: torch.cat([one[name] for one in several]) for name in several[0]})


def unpacked(batch: Any, unpack: Unpack | None) -> Part:
    """The samples of a user's batch.

    Without `unpack`: a tensor is the input; of a pair the second is the target; of a dict the
    target is what is called labels, label, targets, target or y, and the rest are the model's
    keyword arguments.
    """
    taken = (unpack or _by_shape)(batch)
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
    # A tensor made in inference mode cannot be used where gradients are taken.
    return part.mapped(lambda t: t.clone() if t.is_inference() else t.detach())


def _by_shape(batch: Any) -> tuple[Any, Tensor | None]:
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
