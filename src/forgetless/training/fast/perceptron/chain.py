"""The gradient of a perceptron by hand, in a fraction of the time that autograd takes for it.

Small networks are bound by the number of calls or, on a GPU, of kernels, and not by their work. A
chain of linear layers with ReLU between them needs one of ours a layer on the way forward (two if
it has many inputs), one on the way back, and one for the loss:

    h₀ = x,   h_l = max(0, h_{l−1} W_lᵀ + b_l),   z = h_{L−1} W_Lᵀ + b_L,
    D_L = (softmax(z) − onehot) / n,   D_{l−1} = (D_l W_l) ∘ [h_{l−1} > 0],
    ∂W_l = D_lᵀ h_{l−1},   ∂b_l = Σ_n D_l.

A batch norm in eval mode before a ReLU costs none of them more. With a_l = h_{l−1} W_lᵀ + b_l,

    u_l = (a_l − μ) / √(σ² + ε),   h_l = max(0, γ ∘ u_l + β),
    ∂β = Σ_n E_l,   ∂γ = Σ_n E_l ∘ u_l,   D_l = E_l ∘ γ / √(σ² + ε)   for E_l = ∂(γ ∘ u_l + β).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Size, Tensor, nn

from forgetless.training.fast.perceptron import products

Factors = dict[int, tuple[Tensor, Tensor]]  # where a layer's weights lie → D_l, h_{l−1}
_MANY = 100  # samples, from which on it is their number that takes time, not that of kernels


@final
@dataclass(frozen=True, eq=False)
class Norm:
    """A batch norm in eval mode: where γ and β lie in a flat vector, μ and σ² (S, outputs), ε."""

    scale: int
    shift: int
    mean: Tensor
    variance: Tensor
    eps: float


@final
@dataclass(frozen=True, eq=False)
class Layer:
    """Where a linear layer's parameters lie in a flat vector, its sizes, and the norm after it."""

    weight: int
    bias: int
    inputs: int
    outputs: int
    norm: Norm | None = None


@final
class Perceptron:
    """Linear layers, norms and ReLU between them, S sets of weights in one flat tensor (S, p).

    Arguments:
        layers: first to last.
        size: p.
        flattens: whether inputs of any shape are flattened first.
        kernels: the module with the compiled functions, if there is a GPU that runs them.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        size: int,
        *,
        flattens: bool = False,
        kernels: Any | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.size = size
        self.flattens = flattens
        self.kernels = kernels
        self.has_norms = any(layer.norm for layer in layers)
        # Numbers that kernels write for one sample; their places are counted in 32 bits.
        self._widest = max(layer.outputs * -(-layer.inputs // 64) for layer in layers)

    def takes(self, inputs: Tensor) -> bool:
        """Whether it does with the inputs (S, n, *) what the module does."""
        return inputs.dim() == 3 or (self.flattens and inputs.dim() > 3)

    def gradient(
        self,
        theta: Tensor,
        inputs: Tensor,
        labels: Tensor,
        tasks: Tensor,
        active: Tensor | None,
        outers: Factors | None = None,
    ) -> Tensor:
        """The gradients of the mean cross-entropy of K sets of samples a seed, (S · K, p).

        Arguments:
            theta: (S, p).
            inputs: (S · K, n, *).
            labels, tasks: (S · K, n).
            active: the outputs that belong to each task, (T, C) of bool; None for all.
            outers: takes D_l and h_{l−1} of every layer, by the place of its weights.
        """
        run = self._faster(len(theta), len(labels) // len(theta), labels.shape[1])
        gradient = theta.new_empty(len(inputs), self.size)
        first = inputs.flatten(2)
        hidden, normed = [first if first.stride(2) == 1 else first.contiguous()], []
        for layer in self.layers:
            relu = layer is not self.layers[-1]
            above, u = run.forward(hidden[-1], theta, layer, relu=relu)
            hidden.append(above)
            normed.append(u)
        error = run.loss(hidden.pop(), labels, tasks, active, gradient, self.layers[-1])
        for number in range(len(self.layers) - 1, -1, -1):
            lower = self.layers[number - 1] if number else None
            below, u = hidden[number], normed[number - 1] if number else None
            if outers is not None:
                outers[self.layers[number].weight] = error, below
            error = run.backward(error, theta, below, u, gradient, self.layers[number], lower)
        return gradient

    def _faster(self, seeds: int, sets: int, samples: int) -> Any:
        """Kernels of our own, of which there are few, or a library's products.

        Arguments:
            seeds: S.
            sets: of samples that each seed has.
            samples: of each set.
        """
        if self.kernels is None or sets > 1 or samples >= _MANY:
            return products
        fits = self.layers[-1].outputs <= self.kernels.MOST_OUTPUTS
        return self.kernels if fits and seeds * samples * self._widest < 2**31 else products

    def logits(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """All outputs: (S, p), (S, n, *) → (S, n, C)."""
        values = inputs.flatten(2)
        for layer in self.layers:
            relu = layer is not self.layers[-1]
            values, _ = products.forward(values, theta, layer, relu=relu)
        return values


def perceptron_of(
    module: nn.Module, shapes: Mapping[str, Size], fixed: Mapping[str, Tensor], theta: Tensor
) -> Perceptron | None:
    """The module as a perceptron, if it is one.

    Arguments:
        module: any network.
        shapes: of the parameters that are trained, by name, in the order in which they lie in a
            flat vector.
        fixed: everything else, (S, *shape) by name; norms look at it whenever they are run.
        theta: the flat vectors, (S, p).
    """
    chain = list(_chain(module, ""))
    flattens = bool(chain) and _flattens(chain[0][1])
    linear, norms = _linear_and_norms(chain[flattens:])
    names = [f"{n}{part}" for n in (*linear, *norms) for part in ("weight", "bias")]
    statistics = [f"{n}running_{part}" for n in norms for part in ("mean", "var")]
    known = set(names) == set(shapes) and fixed.keys() >= set(statistics)
    if not linear or not known or theta.device.type not in ("cpu", "cuda"):
        return None
    sizes = [shape.numel() for shape in shapes.values()]
    starts = {n: sum(sizes[:i]) for i, n in enumerate(shapes)}
    after = {
        before: Norm(
            starts[f"{n}weight"],
            starts[f"{n}bias"],
            fixed[f"{n}running_mean"],
            fixed[f"{n}running_var"],
            norm.eps,
        )
        for n, (norm, before) in norms.items()
    }
    layers = [
        Layer(starts[f"{n}weight"], starts[f"{n}bias"], m.in_features, m.out_features, after.get(n))
        for n, m in linear.items()
    ]
    kernels = _kernels() if _can_run(theta) else None
    return Perceptron(layers, sum(sizes), flattens=flattens, kernels=kernels)


def _flattens(module: nn.Module) -> bool:
    """Whether it makes one vector of each sample."""
    return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)


def _linear_and_norms(
    chain: Sequence[tuple[str, nn.Module]],
) -> tuple[dict[str, nn.Linear], dict[str, tuple[nn.BatchNorm1d, str]]]:
    """A perceptron's layers by name, norms each with the name of the layer before it.

    No layers if it is none: linear ones, ReLU between them, some with a norm before.
    """
    linear: dict[str, nn.Linear] = {}
    norms: dict[str, tuple[nn.BatchNorm1d, str]] = {}
    latest: type[nn.Module] = nn.ReLU
    before = ""
    for name, part in chain:
        if type(part) is nn.Linear and part.bias is not None and latest is nn.ReLU:
            linear[name] = part
            before = name
        elif type(part) is nn.BatchNorm1d and _is_affine(part) and latest is nn.Linear:
            norms[name] = part, before
        elif type(part) is not nn.ReLU or latest is nn.ReLU:
            return {}, {}
        latest = type(part)
    return (linear, norms) if latest is nn.Linear else ({}, {})


def _is_affine(norm: nn.BatchNorm1d) -> bool:
    """Whether it has γ, β, and statistics for eval mode."""
    return norm.affine and norm.running_mean is not None


def _chain(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """What a module does, one module after the other, with their names' beginnings."""
    if is_chain(module):
        for child, part in links(module):
            yield from _chain(part, f"{name}{child}.")
    else:
        yield name, nn.Identity() if _has_hooks(module) else module


def links(chain: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A chain's modules and their names; one that is used twice twice, unlike `named_children`."""
    return ((name, part) for name, part in chain._modules.items() if part is not None)


def is_chain(module: nn.Module) -> bool:
    """Whether a module does what its children do, one after the other, and nothing else."""
    return type(module).forward is nn.Sequential.forward and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in vars(module) if hooks.endswith("_hooks"))


def _can_run(theta: Tensor) -> bool:
    """Whether kernels take it."""
    return theta.is_cuda and theta.dtype == torch.float32 and theta.numel() < 2**31


@cache
def _kernels() -> Any:
    """The compiled functions, or None without Triton."""
    try:
        from forgetless.training.fast.perceptron import kernels
    except ImportError:
        return None
    return kernels
