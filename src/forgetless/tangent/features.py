"""φ(X), one row per sample, as an operator that does not build its n×p matrix unless asked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from forgetless.linalg import top_eigenpairs
from forgetless.tangent.blocks import Block, LinearBlock, RowBlock

# outputs (n, C) and what belongs to each sample → one scalar per sample (n,)
Scalar = Callable[..., Tensor]


@final
@dataclass(frozen=True)
class TangentFeatures:
    """φ = ∂s(x_i)/∂θ for n samples, (n, p): layer by layer, as factors where the layer allows.

    `names` and `sizes` fix the order of the p columns; `blocks` hold them in any order; `like` is
    an empty tensor of the features' dtype and device.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    blocks: tuple[Block, ...]
    n: int
    like: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(n, p)."""
        return self.n, sum(self.sizes)

    def dense(self) -> Tensor:
        """φ itself, (n, p)."""
        return self._in_order([b.dense() for b in self.blocks])

    def gram(self) -> Tensor:
        """φ φᵀ, (n, n) in float64."""
        return torch.stack([b.gram() for b in self.blocks]).sum(0)

    def combine(self, weights: Tensor) -> Tensor:
        """Weights @ φ: (k, n) → (k, p)."""
        return self._in_order([b.combine(weights) for b in self.blocks])

    def squared_sum(self) -> Tensor:
        """Σ_i φ_i², element by element, (p,)."""
        return self._in_order([b.squared_sum() for b in self.blocks])

    def top(self, components: int | float, *, centred: bool = False) -> tuple[Tensor, Tensor]:
        """The top right singular vectors of φ: the directions in which the samples' outputs move.

        With φ φᵀ = U Σ² Uᵀ they are V = Σ⁻¹ Uᵀ φ, from the n×n Gram matrix and one product.

        Arguments:
            components: how many directions (an int), or the share of the variance that they
                explain together (a float in (0, 1)).
            centred: subtract the mean feature first, as PCA does.

        Returns:
            singular values (k,) and directions (k, p), k at most the rank.
        """
        gram = self.gram()
        if centred:
            gram = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()
        by_share = isinstance(components, float)
        values, vectors = top_eigenpairs(gram, None if by_share else int(components))
        if by_share:
            explained = values.cumsum(0) / gram.trace()
            kept = int((explained < components).sum()) + 1
            values, vectors = values[:kept], vectors[:, :kept]
        weights = (vectors / values.sqrt()).T
        if centred:
            weights = weights - weights.mean(1, keepdim=True)
        return values.sqrt().to(self.like), self.combine(weights.to(self.like))

    def _in_order(self, parts: Sequence[list[tuple[str, Tensor]]]) -> Tensor:
        columns = {name: value for part in parts for name, value in part}
        return torch.cat([columns[name] for name in self.names], dim=-1)


def tangent_features(
    module: nn.Module,
    values: Mapping[str, Tensor],
    inputs: Tensor,
    scalar: Scalar,
    *belongings: Tensor,
    names: Sequence[str],
    chunk: int = 1024,
) -> TangentFeatures:
    """The gradient of one scalar per sample with respect to the named parameters.

    Arguments:
        module: the network, in eval mode (a sample's output must not depend on its neighbours).
        values: its parameters and buffers, by name.
        inputs: (n, *).
        scalar: from the outputs of some samples, and their belongings, to one number a sample.
        belongings: tensors (n, *) that go with the samples, such as labels.
        names: the parameters, in the order of the columns of φ.
        chunk: samples that go through the network at once.
    """
    values = {name: value.detach() for name, value in values.items()}
    chunks = list(zip(inputs.split(chunk), *(b.split(chunk) for b in belongings), strict=True))
    captured = [_capture_linears(module, values, scalar, names, *some) for some in chunks]
    layers = [key for key in captured[0] if all(key in c for c in captured)]
    blocks: list[Block] = []
    for weight, bias in layers:
        factors = [c[weight, bias] for c in captured]
        a, delta = (torch.cat([f[i] for f in factors]) for i in (0, 1))
        blocks.append(LinearBlock(weight, bias, a, delta))
    covered = {name for layer in layers for name in layer}
    rest = [name for name in names if name not in covered]
    rows = [_rows_by_vmap(module, values, scalar, rest, *some) for some in chunks] if rest else []
    blocks += [RowBlock(name, torch.cat([r[name] for r in rows])) for name in rest]
    sizes = tuple(values[name].numel() for name in names)
    like = inputs.new_empty(0, dtype=values[names[0]].dtype)
    return TangentFeatures(tuple(names), sizes, tuple(blocks), len(inputs), like)


_Layer = tuple[str | None, str | None]  # the names of a linear layer's weight and bias


def _capture_linears(
    module: nn.Module,
    values: Mapping[str, Tensor],
    scalar: Scalar,
    names: Sequence[str],
    inputs: Tensor,
    *belongings: Tensor,
) -> dict[_Layer, tuple[Tensor, Tensor]]:
    """Inputs a and output gradients δ of the linear layers that ran exactly once, on (n, n_in).

    One forward and one backward pass: samples do not interact, so ∂(Σ_i s_i)/∂z_i = ∂s_i/∂z_i.
    A layer counts only if Σ_i δ_i a_iᵀ is what autograd finds for its weight; a weight that is
    tied or used elsewhere as well fails that and is left to the caller.
    """
    linears = {m: prefix for prefix, m in module.named_modules() if type(m) is nn.Linear}
    calls: dict[nn.Linear, list[tuple[Tensor, Tensor]]] = {m: [] for m in linears}

    def remember(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        calls[layer].append((args[0].detach(), output))  # type: ignore[index]
        return output.clone()  # the activation after it may work in place

    handles = [m.register_forward_hook(remember) for m in linears]
    leaves = {name: values[name].clone().requires_grad_() for name in names}
    try:
        with torch.enable_grad():
            outputs = functional_call(module, {**values, **leaves}, (inputs,))
            total = scalar(outputs, *belongings).sum()
    finally:
        for handle in handles:
            handle.remove()

    once = [
        m
        for m, seen in calls.items()
        if len(seen) == 1 and seen[0][0].dim() == 2 and len(seen[0][0]) == len(inputs)
    ]
    named = {m: _parameter_names(linears[m], m, leaves) for m in once}
    named = {m: layer for m, layer in named.items() if any(layer)}
    wanted = [calls[m][0][1] for m in named] + list(leaves.values())
    grads = torch.autograd.grad(total, wanted, allow_unused=True)
    sums = dict(zip(leaves, grads[len(named) :], strict=True))
    captured: dict[_Layer, tuple[Tensor, Tensor]] = {}
    for (m, (weight, bias)), delta in zip(named.items(), grads, strict=False):
        a = calls[m][0][0]
        delta = torch.zeros_like(calls[m][0][1]) if delta is None else delta
        if _agree(sums.get(weight or ""), delta.T @ a) and _agree(
            sums.get(bias or ""), delta.sum(0)
        ):
            captured[weight, bias] = (a, delta)
    return captured


def _parameter_names(prefix: str, layer: nn.Linear, wanted: Mapping[str, Tensor]) -> _Layer:
    full = {kind: f"{prefix}.{kind}" if prefix else kind for kind, _ in layer.named_parameters()}
    weight, bias = full["weight"], full.get("bias", "")
    return weight if weight in wanted else None, bias if bias in wanted else None


def _agree(by_autograd: Tensor | None, by_factors: Tensor) -> bool:
    """Whether two ways to the same sum differ only by rounding; nothing to compare agrees."""
    if by_autograd is None:
        return True
    difference = (by_autograd - by_factors).norm()
    return bool(difference <= 1e-3 * by_factors.norm())


def _rows_by_vmap(
    module: nn.Module,
    values: Mapping[str, Tensor],
    scalar: Scalar,
    names: Sequence[str],
    inputs: Tensor,
    *belongings: Tensor,
) -> dict[str, Tensor]:
    """Per-sample gradients of the named parameters, (n, size) each, for any module."""

    def of_one(leaves: dict[str, Tensor], x: Tensor, *belonging: Tensor) -> Tensor:
        outputs = functional_call(module, {**values, **leaves}, (x.unsqueeze(0),))
        return scalar(outputs, *(b.unsqueeze(0) for b in belonging)).squeeze(0)

    leaves = {name: values[name] for name in names}
    in_dims = (None, 0, *(0 for _ in belongings))
    gradients = vmap(grad(of_one), in_dims=in_dims)(leaves, inputs, *belongings)
    return {name: rows.flatten(1) for name, rows in gradients.items()}
