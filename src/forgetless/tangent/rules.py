"""Rules: the per-sample gradients of a layer's parameters from its inputs and output gradients.

A rule takes δ = ∂f/∂z, the gradient at the layer's output, with all samples of a chunk in one
tensor, and returns each parameter's contribution: a pair of factors or rows. It assumes that
samples are the leading dimension (`axis` 0: n, or n times something, sample by sample) or the
second one (`axis` 1); the caller checks whether that is true.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from forgetless.tangent.factors import Dense, Left, OneHot, Patches, Right, Window

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
Contribution = tuple[Left, Right] | Tensor  # factors (n, g, T, ·), or rows (n, size)
Contributions = Mapping[str, Contribution]  # by the parameter's name within the layer


@final
@dataclass(frozen=True)
class Rule:
    """How the gradients of one type of layer are computed.

    Arguments:
        labels: parameter within the layer → the rule's label in `TangentFeatures.rules`.
        keep: (layer, input) → what is needed of the input; None if the rule does not apply.
        contributions: (layer, kept, δ, n, axis) → each parameter's contribution; None if the
            shapes do not fit.
    """

    labels: Mapping[str, str]
    keep: Callable[..., Tensor | None]
    contributions: Callable[..., Contributions | None]


def _keep_input(layer: nn.Module, x: Tensor) -> Tensor | None:
    return x


def _by_sample(values: Tensor, n: int, axis: int, features: int) -> Tensor | None:
    """(n, T, *features) from values whose last `features` dimensions are not positions."""
    leading = values.dim() - features
    if axis == 0 and leading >= 1 and values.shape[0] % n == 0:
        return values.reshape(n, -1, *values.shape[leading:])
    if axis == 1 and leading >= 2 and values.shape[1] == n:
        return values.transpose(0, 1).reshape(n, -1, *values.shape[leading:])
    return None


def _linear(layer: nn.Linear, x: Tensor, delta: Tensor, n: int, axis: int) -> Contributions | None:
    left, right = _by_sample(delta, n, axis, 1), _by_sample(x, n, axis, 1)
    if left is None or right is None:
        return None
    bias = left.sum(1) if left.shape[1] > 1 else left[:, 0]
    return {"weight": (Dense(left.unsqueeze(1)), Dense(right.unsqueeze(1))), "bias": bias}


def window_of(layer: Convolution) -> Window:
    """The geometry of a convolution's patches."""
    return Window(
        tuple(layer.kernel_size),
        tuple(layer.stride),
        tuple(layer.dilation),
        tuple(layer._reversed_padding_repeated_twice),
        "constant" if layer.padding_mode == "zeros" else layer.padding_mode,
    )


def _convolution(
    layer: Convolution, x: Tensor, delta: Tensor, n: int, axis: int
) -> Contributions | None:
    images = _by_sample(x, n, axis, len(layer.kernel_size) + 1)
    deltas = _by_sample(delta.flatten(2), n, axis, 2)  # (n, k, out, outputs)
    if axis == 1 or images is None or deltas is None or x.dim() != len(layer.kernel_size) + 2:
        return None
    k, outputs = deltas.shape[1], deltas.shape[3]
    right = Patches(images, layer.groups, window_of(layer), k * outputs)
    left = deltas.unflatten(2, (layer.groups, -1)).permute(0, 2, 1, 4, 3).flatten(2, 3)
    return {"weight": (Dense(left), right), "bias": deltas.sum((1, 3))}


def _keep_tokens(layer: nn.Embedding, x: Tensor) -> Tensor | None:
    # max_norm rewrites the weight during the forward pass.
    return x if layer.max_norm is None else None


def _embedding(
    layer: nn.Embedding, x: Tensor, delta: Tensor, n: int, axis: int
) -> Contributions | None:
    index, deltas = _by_sample(x, n, axis, 0), _by_sample(delta, n, axis, 1)
    if index is None or deltas is None:
        return None
    index = index.long()
    if layer.padding_idx is not None:
        deltas = deltas.masked_fill((index == layer.padding_idx).unsqueeze(-1), 0)
    return {"weight": (OneHot(index, layer.num_embeddings), Dense(deltas.unsqueeze(1)))}


def _keep_normalized(layer: nn.LayerNorm | nn.GroupNorm | _BatchNorm, x: Tensor) -> Tensor | None:
    """The layer's output before weight and bias: x̂."""
    if isinstance(layer, nn.LayerNorm):
        return functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return functional.group_norm(x, layer.num_groups, eps=layer.eps)
    if layer.training or layer.running_mean is None or layer.running_var is None:
        return None
    return functional.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)


def _layer_norm(
    layer: nn.LayerNorm, x_hat: Tensor, delta: Tensor, n: int, axis: int
) -> Contributions | None:
    features = len(layer.normalized_shape)
    weight = _by_sample(delta * x_hat, n, axis, features)
    bias = _by_sample(delta, n, axis, features)
    if weight is None or bias is None:
        return None
    return {"weight": weight.sum(1).flatten(1), "bias": bias.sum(1).flatten(1)}


def _channel_norm(
    layer: nn.Module, x_hat: Tensor, delta: Tensor, n: int, axis: int
) -> Contributions | None:
    if axis == 1 or len(delta) % n:
        return None
    channels = delta.shape[1]

    def summed(values: Tensor) -> Tensor:
        return values.reshape(n, -1, channels, prod(values.shape[2:])).sum((1, 3))

    return {"weight": summed(delta * x_hat), "bias": summed(delta)}


_CONVOLUTION = Rule({"weight": "conv", "bias": "bias"}, _keep_input, _convolution)
_NORM = {"weight": "norm", "bias": "norm"}
_CHANNEL_NORM = Rule(_NORM, _keep_normalized, _channel_norm)

# Exact types only: a subclass may do something else in its forward.
RULES: Mapping[type[nn.Module], Rule] = {
    nn.Linear: Rule({"weight": "linear", "bias": "bias"}, _keep_input, _linear),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.Embedding: Rule({"weight": "embedding"}, _keep_tokens, _embedding),
    nn.LayerNorm: Rule(_NORM, _keep_normalized, _layer_norm),
    nn.GroupNorm: _CHANNEL_NORM,
    nn.BatchNorm1d: _CHANNEL_NORM,
    nn.BatchNorm2d: _CHANNEL_NORM,
    nn.BatchNorm3d: _CHANNEL_NORM,
}


def matrix_shape(layer: nn.Module, shape: torch.Size) -> tuple[int, int, int]:
    """A weight as g matrices r×c: (g, r, c)."""
    groups = layer.groups if isinstance(layer, Convolution) else 1
    return groups, shape[0] // groups, prod(shape[1:])
