"""The gradient of a perceptron by hand, in a fraction of the time of autograd.

Small networks are bound by the number of calls or, on a GPU, of kernels, not by arithmetic. A chain
of linear layers with ReLU between them needs few:

    h₀ = x,   h_l = max(0, h_{l−1} W_lᵀ + b_l),   z = h_{L−1} W_Lᵀ + b_L,
    D_L = (softmax(z) − onehot) / n,   D_{l−1} = (D_l W_l) ∘ [h_{l−1} > 0],
    ∂W_l = D_lᵀ h_{l−1},   ∂b_l = Σ_n D_l.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import final

import torch
from torch import Size, Tensor, nn

from forgetless.methods import Samples

_MANY = 100  # samples from which on a library's products are faster than kernels of our own


@final
@dataclass(frozen=True)
class Layer:
    """A linear layer: offsets of its parameters in a flat vector, and its sizes."""

    weight: int
    bias: int
    inputs: int
    outputs: int


@final
class Perceptron:
    """Linear layers with ReLU between them, S sets of weights in one flat tensor (S, p).

    Arguments:
        layers: first to last.
        size: p.
        flattens: whether inputs of any shape are flattened first.
        kernels: the module of compiled functions, on a GPU that runs them.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        size: int,
        *,
        flattens: bool = False,
        kernels: ModuleType | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.size = size
        self.flattens = flattens
        self.kernels = kernels
        # Numbers that kernels write for one sample; they index with 32 bits.
        self._widest = max(layer.outputs * -(-layer.inputs // 64) for layer in layers)

    def takes(self, inputs: Tensor) -> bool:
        """Whether it computes what the module does on inputs (S, n, *)."""
        return inputs.dim() == 3 or (self.flattens and inputs.dim() > 3)

    def gradient(self, theta: Tensor, samples: Samples, active: Tensor | None) -> Tensor:
        """The gradients of the mean cross-entropy of K sets of samples a seed, (S · K, p).

        Arguments:
            theta: (S, p).
            samples: inputs (S · K, n, *), labels and tasks (S · K, n).
            active: the outputs that belong to each task, (T, C) of bool; None for all.
        """
        labels = samples.labels
        run = self._products(len(theta), len(labels) // len(theta), labels.shape[1])

        def error_of(z: Tensor, gradient: Tensor, last: Layer) -> Tensor:
            found: Tensor = run.loss(z, labels, samples.tasks, active, gradient, last)
            return found

        return self._through(run, theta, samples.inputs, error_of)

    def gradient_of(
        self, theta: Tensor, inputs: Tensor, error: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The gradient of any function of the outputs, (S, p).

        Arguments:
            theta: (S, p).
            inputs: (S, n, *).
            error: from outputs (S, n, C) to the function's gradient in them.
        """

        def error_of(z: Tensor, gradient: Tensor, last: Layer) -> Tensor:
            found = error(z)
            torch.sum(found, 1, out=_slot(gradient, last.bias, last.outputs))
            return found

        run = self._products(len(theta), 1, inputs.shape[1])
        return self._through(run, theta, inputs, error_of)

    def _through(
        self,
        run: "ModuleType | type[Products]",
        theta: Tensor,
        inputs: Tensor,
        error_of: Callable[[Tensor, Tensor, Layer], Tensor],
    ) -> Tensor:
        """Forward, from outputs to their error D_L (which stores its bias gradient), and back."""
        inputs = inputs.flatten(2)
        gradient = theta.new_empty(len(inputs), self.size)
        hidden = [inputs if inputs.stride(2) == 1 else inputs.contiguous()]
        for layer in self.layers:
            relu = layer is not self.layers[-1]
            hidden.append(run.forward(hidden[-1], theta, layer, relu=relu))
        error = error_of(hidden.pop(), gradient, self.layers[-1])
        for number in range(len(self.layers) - 1, -1, -1):
            below = self.layers[number - 1] if number else None
            error = run.backward(error, theta, hidden[number], gradient, self.layers[number], below)
        return gradient

    def _products(self, seeds: int, sets: int, samples: int) -> "ModuleType | type[Products]":
        """Kernels of our own, which are few, or a library's products."""
        if self.kernels is None or sets > 1 or samples >= _MANY:
            return Products
        fits = self.layers[-1].outputs <= self.kernels.MOST_OUTPUTS
        return self.kernels if fits and seeds * samples * self._widest < 2**31 else Products

    def logits(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """All outputs: (S, p), (S, n, *) → (S, n, C)."""
        values = inputs.flatten(2)
        for layer in self.layers:
            values = Products.forward(values, theta, layer, relu=layer is not self.layers[-1])
        return values


@final
class Products:
    """The steps of a perceptron in PyTorch's products; `kernels` has the same functions."""

    @staticmethod
    def forward(x: Tensor, theta: Tensor, layer: Layer, *, relu: bool) -> Tensor:
        """x Wᵀ + b or its positive part: (S · K, n, i), (S, p) → (S · K, n, o)."""
        weight = _slot(theta, layer.weight, layer.outputs, layer.inputs)
        bias = _slot(theta, layer.bias, 1, layer.outputs)
        values = torch.baddbmm(bias, _by_seed(x, theta), weight.mT)
        if relu:
            values.relu_()
        return values.view(*x.shape[:-1], layer.outputs)

    @staticmethod
    def loss(
        z: Tensor,
        labels: Tensor,
        tasks: Tensor,
        active: Tensor | None,
        gradient: Tensor,
        layer: Layer,
    ) -> Tensor:
        """(softmax(z) − onehot) / n among each sample's outputs, (S · K, n, C)."""
        others = None if active is None else ~active[tasks]
        error = (z if others is None else z.masked_fill(others, -torch.inf)).softmax(-1)
        one = error.new_ones(()).expand(*labels.shape, 1)
        error.scatter_add_(-1, labels.unsqueeze(-1), -one).div_(z.shape[1])
        if others is not None:  # no gradient, not even for a label among them
            error.masked_fill_(others, 0)
        torch.sum(error, 1, out=_slot(gradient, layer.bias, layer.outputs))
        return error

    @staticmethod
    def backward(
        error: Tensor,
        theta: Tensor,
        hidden: Tensor,
        gradient: Tensor,
        layer: Layer,
        below: Layer | None,
    ) -> Tensor:
        """Stores Dᵀ h and the bias gradient of the layer below; returns that layer's error.

        (S · K, n, o), (S, p), (S · K, n, i) → (S · K, n, i): (D W) ∘ [h > 0].
        """
        torch.bmm(error.mT, hidden, out=_slot(gradient, layer.weight, layer.outputs, layer.inputs))
        if below is None:
            return error
        weight = _slot(theta, layer.weight, layer.outputs, layer.inputs)
        error = torch.bmm(_by_seed(error, theta), weight).view(hidden.shape)
        error = torch.ops.aten.threshold_backward(error, hidden, 0)
        torch.sum(error, 1, out=_slot(gradient, below.bias, below.outputs))
        return error


def _slot(flat: Tensor, start: int, *shape: int) -> Tensor:
    """The parameters of one shape, (S, *shape), as a view of all, (S, p)."""
    return flat[:, start : start + Size(shape).numel()].view(-1, *shape)


def _by_seed(values: Tensor, theta: Tensor) -> Tensor:
    """The sets of samples of each seed (S · K, n, *) in one: (S, K · n, *)."""
    return values.reshape(len(theta), -1, values.shape[-1])


def perceptron_of(
    module: nn.Module, shapes: Mapping[str, Size], theta: Tensor
) -> Perceptron | None:
    """The module as a perceptron, None if it is anything else.

    Arguments:
        module: any network.
        shapes: trained parameters by name, in their order in a flat vector.
        theta: the flat vectors, (S, p).
    """
    chain = list(_chain(module, ""))
    flattens = bool(chain) and _flattens(chain[0][1])
    chain = chain[flattens:]
    linear = {n: part for n, part in chain if type(part) is nn.Linear and part.bias is not None}
    alternates = len(chain) % 2 == 1 and all(
        name in linear if i % 2 == 0 else type(part) is nn.ReLU
        for i, (name, part) in enumerate(chain)
    )
    trained = {f"{n}{part}" for n in linear for part in ("weight", "bias")} == set(shapes)
    if not alternates or not trained or theta.device.type not in ("cpu", "cuda"):
        return None
    sizes = [shape.numel() for shape in shapes.values()]
    starts = {n: sum(sizes[:i]) for i, n in enumerate(shapes)}
    layers = [
        Layer(starts[f"{n}weight"], starts[f"{n}bias"], part.in_features, part.out_features)
        for n, part in linear.items()
    ]
    has_kernels = theta.is_cuda and theta.dtype == torch.float32 and theta.numel() < 2**31
    kernels = _kernels() if has_kernels else None
    return Perceptron(layers, sum(sizes), flattens=flattens, kernels=kernels)


def _flattens(module: nn.Module) -> bool:
    """Whether it makes one vector of each sample."""
    return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)


def _chain(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that run one after another in a Sequential, with the prefixes of their names."""
    hooked = any(getattr(module, hooks) for hooks in vars(module) if hooks.endswith("_hooks"))
    if hooked:
        yield name, nn.Identity()
    elif type(module).forward is nn.Sequential.forward:
        # Not `named_children`, which skips a module that is used a second time.
        for child, part in module._modules.items():
            if part is not None:
                yield from _chain(part, f"{name}{child}.")
    else:
        yield name, module


@cache
def _kernels() -> ModuleType | None:
    """The compiled functions, or None without Triton."""
    try:
        from forgetless.training.fast import kernels
    except ImportError:
        return None
    return kernels
