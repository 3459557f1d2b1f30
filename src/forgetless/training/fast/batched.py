"""Linear layers of many networks at once, in fewer and better filled kernels than `vmap` makes.

`vmap` of a linear layer is a product, a copy of its bias, a sum, and in the backward pass copies of
transposed weight gradients: on a GPU, where small networks are bound by the number of kernels and
not by their work, twice the time.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

# A product whose result has few tiles keeps few processors busy: it is cut along the inner
# dimension until there are about this many, in parts no shorter than _SHORTEST.
_TILE = 32
_ENOUGH_TILES = 256
_SHORTEST = 128


def _parts(x: Tensor, weight: Tensor) -> int:
    """In how many parts the inner dimension of x Wᵀ is best summed."""
    seeds, n, inner = x.shape
    tiles = seeds * -(-n // _TILE) * -(-weight.shape[1] // _TILE)
    parts = 1
    while (
        parts * tiles < _ENOUGH_TILES
        and inner % (2 * parts) == 0
        and inner // (2 * parts) >= _SHORTEST
    ):
        parts *= 2
    return parts


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X Wᵀ + b for each seed: (S, n, i), (S, o, i), (S, o) → (S, n, o)."""
    parts = _parts(x, weight)
    if parts == 1:
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
    shape = (parts, x.shape[2] // parts)
    left, right = (t.unflatten(2, shape).transpose(1, 2).flatten(0, 1) for t in (x, weight))
    sums: Tensor = torch.bmm(left, right.mT).unflatten(0, (-1, parts)).sum(1)
    return sums if bias is None else sums + bias.unsqueeze(1)


class _Batched(torch.autograd.Function):
    """X Wᵀ + b of S networks; gradients come out in the layout of the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = outer
        wanted = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if wanted[0] else None,
            torch.bmm(grad.mT, x) if wanted[1] else None,
            grad.sum(1) if wanted[2] else None,
        )


class _Linear(torch.autograd.Function):
    """The layer as one network sees it: only its rule for `vmap` is ever used."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept: there is no backward pass without `vmap`."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, int]:
        def with_seeds(tensor: Tensor | None, dim: int | None) -> Tensor | None:
            if tensor is None:
                return None
            if dim is None:
                return tensor.expand(info.batch_size, *tensor.shape)
            return tensor.movedim(dim, 0)

        stacked = (with_seeds(t, d) for t, d in zip(tensors, in_dims, strict=True))
        result: Tensor = _Batched.apply(*stacked)  # type: ignore[no-untyped-call]
        return result, 0


@final
class BatchedLinear(TorchFunctionMode):
    """While active under `vmap`, linear layers of (n, inputs) run as one product for all seeds."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if input.dim() != 2:
            return linear(input, weight, bias)
        return _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
