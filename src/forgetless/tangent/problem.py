"""Whose gradients are wanted: a network at fixed weights, samples, and scalars of each of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from torch import Tensor, nn

from forgetless.tangent.functional import called

# outputs of n samples and what belongs to them → (n,), or (n, K) for K scalars a sample
Scalar = Callable[..., Tensor]


@final
@dataclass(frozen=True)
class Problem:
    """K scalars of each of n samples as functions of the parameters `names`.

    Arguments:
        module: the network; only its structure counts, not its present weights or modes.
        values: its parameters and buffers, by name.
        modes: each of its modules' `training` flag.
        names: the parameters, in the order of the columns of φ.
        args, kwargs: its inputs, tensors (n, *).
        scalar: from the network's outputs and the belongings to (n,) or (n, K).
        belongings: tensors (n, *), such as labels.
    """

    module: nn.Module
    values: Mapping[str, Tensor]
    modes: Mapping[nn.Module, bool]
    names: tuple[str, ...]
    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor]
    scalar: Scalar
    belongings: tuple[Tensor, ...]

    @classmethod
    def at(
        cls,
        module: nn.Module,
        values: Mapping[str, Tensor],
        names: tuple[str, ...],
        args: tuple[Tensor, ...],
        kwargs: Mapping[str, Tensor],
        scalar: Scalar,
        belongings: tuple[Tensor, ...],
        *,
        lasting: bool = False,
    ) -> Self:
        """At these values, and in the modes that the modules have now.

        Arguments:
            lasting: the values will not be changed; otherwise they are copied.
        """
        modes = {m: m.training for m in module.modules()}
        with torch.inference_mode(False):
            copies = {n: v.detach() if lasting else v.detach().clone() for n, v in values.items()}
        return cls(module, copies, modes, names, (), {}, scalar, ()).on(args, kwargs, belongings)

    def on(
        self,
        args: tuple[Tensor, ...],
        kwargs: Mapping[str, Tensor],
        belongings: tuple[Tensor, ...],
    ) -> Self:
        """The same for other samples."""
        with torch.inference_mode(False):
            args = tuple(_usable(a) for a in args)
            kwargs = {key: _usable(a) for key, a in kwargs.items()}
        return replace(self, args=args, kwargs=kwargs, belongings=belongings)

    @property
    def n(self) -> int:
        """Samples."""
        return len((*self.args, *self.kwargs.values())[0])

    def select(self, samples: slice) -> Self:
        """The same for some of the samples."""
        return replace(
            self,
            args=tuple(a[samples] for a in self.args),
            kwargs={key: a[samples] for key, a in self.kwargs.items()},
            belongings=tuple(b[samples] for b in self.belongings),
        )

    def leaves(self, names: tuple[str, ...] | None = None) -> dict[str, Tensor]:
        """The parameters as new leaves to differentiate with respect to."""
        names = self.names if names is None else names
        return {name: self.values[name].detach().requires_grad_() for name in names}

    def outputs(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """What the network returns."""
        values = {**self.values, **leaves}
        outputs: Tensor = called(self.module, values, self.args, self.kwargs)
        return outputs

    def scalars(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """(n, K)."""
        scalars = self.scalar(self.outputs(leaves), *self.belongings)
        return scalars.unsqueeze(1) if scalars.dim() == 1 else scalars

    @contextmanager
    def running(self) -> Iterator[None]:
        """With the modules in the modes they had, and gradients recorded."""
        present = {module: module.training for module in self.modes}
        for module, training in self.modes.items():
            module.training = training
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            for module, training in present.items():
                module.training = training


def _usable(x: Tensor) -> Tensor:
    """The tensor without its history, as autograd can save it."""
    return x.clone() if x.is_inference() else x.detach()
