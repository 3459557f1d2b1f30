"""The gradient of a perceptron by hand: a third of the kernels that autograd launches for it.

Small networks on a GPU are bound by the number of kernels and not by their work. A chain of linear
layers with ReLU between them needs one kernel a layer on the way forward, two on the way back, and
one for the loss:

    h₀ = x,   h_l = max(0, h_{l−1} W_lᵀ + b_l),   z = h_{L−1} W_Lᵀ + b_L,
    D_L = (softmax(z) − onehot) / n,   D_{l−1} = (D_l W_l) ∘ [h_{l−1} > 0],
    ∂W_l = D_lᵀ h_{l−1},   ∂b_l = Σ_n D_l.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Size, Tensor, nn


@final
@dataclass(frozen=True)
class Layer:
    """Where a linear layer's parameters lie in a flat vector, and its sizes."""

    weight: int
    bias: int
    inputs: int
    outputs: int


@final
class Perceptron:
    """Linear layers with ReLU between them, S sets of weights in one flat tensor (S, p).

    Arguments:
        layers: first to last.
        kernels: the module with the compiled functions.
    """

    def __init__(self, layers: Sequence[Layer], kernels: Any) -> None:
        self.layers = tuple(layers)
        self.kernels = kernels

    @property
    def most(self) -> int:
        """Samples up to which its gradients are the faster ones."""
        most: int = self.kernels.MOST
        return most

    def gradient(
        self, theta: Tensor, inputs: Tensor, labels: Tensor, tasks: Tensor, active: Tensor | None
    ) -> Tensor:
        """The gradient of the mean cross-entropy for each seed, (S, p).

        Arguments:
            theta: (S, p).
            inputs: (S, n, *).
            labels, tasks: (S, n).
            active: the outputs that belong to each task, (T, C) of bool; None for all.
        """
        gradient = torch.empty_like(theta)
        hidden = [inputs.flatten(2)]
        for layer in self.layers:
            relu = layer is not self.layers[-1]
            hidden.append(self.kernels.forward(hidden[-1], theta, layer, relu=relu))
        last = self.layers[-1]
        error = self.kernels.loss(hidden.pop(), labels, tasks, active, gradient, last)
        for number in range(len(self.layers) - 1, -1, -1):
            layer, below = self.layers[number], hidden[number]
            self.kernels.weight_gradient(error, below, gradient, layer)
            if number:
                error = self.kernels.backward(
                    error, theta, below, gradient, layer, self.layers[number - 1]
                )
        return gradient

    def logits(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """All outputs: (S, p), (S, n, *) → (S, n, C)."""
        values = inputs.flatten(2)
        for layer in self.layers:
            shape = layer.outputs, layer.inputs
            weight = theta[:, layer.weight :][:, : layer.outputs * layer.inputs].unflatten(1, shape)
            bias = theta[:, layer.bias :][:, : layer.outputs].unsqueeze(1)
            values = torch.baddbmm(bias, values, weight.mT)
            if layer is not self.layers[-1]:
                values = values.relu_()
        return values


def perceptron_of(
    module: nn.Module, shapes: Mapping[str, Size], theta: Tensor
) -> Perceptron | None:
    """The module as a perceptron, if it is one and a GPU is to run it.

    Arguments:
        module: any network.
        shapes: of the parameters that are trained, by name, in the order in which they lie in a
            flat vector.
        theta: the flat vectors, (S, p).
    """
    chain = list(_chain(module, ""))
    if chain and isinstance(chain[0][1], nn.Flatten) and chain[0][1].start_dim == 1:
        del chain[0]
    linear, between = chain[::2], chain[1::2]
    is_perceptron = (
        len(linear) == len(between) + 1
        and all(type(m) is nn.Linear and m.bias is not None for _, m in linear)
        and all(type(m) is nn.ReLU for _, m in between)
    )
    names = [f"{name}{part}" for name, _ in linear for part in ("weight", "bias")]
    if not is_perceptron or set(names) != set(shapes) or not _can_run(theta):
        return None
    kernels = _kernels()
    sizes = [shape.numel() for shape in shapes.values()]
    starts = {n: sum(sizes[:i]) for i, n in enumerate(shapes)}
    layers = [
        Layer(starts[f"{n}weight"], starts[f"{n}bias"], m.in_features, m.out_features)
        for n, m in linear
        if isinstance(m, nn.Linear)
    ]
    few = layers[-1].outputs <= 256  # of which a program looks at all
    return Perceptron(layers, kernels) if kernels is not None and few else None


def _chain(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """What a module does, one module after the other, with their names' beginnings."""
    if is_chain(module):
        for child, part in module.named_children():
            yield from _chain(part, f"{name}{child}.")
    else:
        yield name, nn.Identity() if _has_hooks(module) else module


def is_chain(module: nn.Module) -> bool:
    """Whether a module does what its children do, one after the other, and nothing else."""
    return type(module).forward is nn.Sequential.forward and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in vars(module) if hooks.endswith("_hooks"))


def _can_run(theta: Tensor) -> bool:
    return theta.is_cuda and theta.dtype == torch.float32 and theta.numel() < 2**31


@cache
def _kernels() -> Any:
    """The compiled functions, or None without Triton."""
    try:
        from forgetless.perceptron import kernels
    except ImportError:
        return None
    return kernels
