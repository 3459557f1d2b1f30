"""Autograd as the reference: rows by vmap or a loop, the check of a rule, uses of parameters."""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any, final

import torch
import torch._C._functorch as functorch
from torch import Tensor
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode

from forgetless.linalg import float64
from forgetless.tangent.blocks import Block
from forgetless.tangent.evaluation import Evaluation, call_with

# What vmap raises when an operation or a branch on data does not allow it.
VMAP_ERRORS = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, KeyError)


def rows_by_vmap(
    evaluation: Evaluation, names: tuple[str, ...], count: int
) -> list[dict[str, Tensor]]:
    """For each of the K scalars, the named parameters' gradients (n, size)."""

    def of_one(
        leaves: dict[str, Tensor],
        args: tuple[Tensor, ...],
        kwargs: Mapping[str, Tensor],
        targets: tuple[Tensor, ...],
        column: int,
    ) -> Tensor:
        outputs = call_with(
            evaluation.module,
            {**evaluation.values, **leaves},
            tuple(a.unsqueeze(0) for a in args),
            {key: a.unsqueeze(0) for key, a in kwargs.items()},
        )
        scalars = evaluation.scalar(outputs, *(b.unsqueeze(0) for b in targets))
        return scalars.reshape(-1)[column]

    leaves = {name: evaluation.values[name] for name in names}
    samples = evaluation.args, dict(evaluation.kwargs), evaluation.targets
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of slow batching rules
        for column in range(count):
            per_sample = vmap(grad(of_one), in_dims=(None, 0, 0, 0, None))
            gradients = per_sample(leaves, *samples, column)
            found.append({name: rows.reshape(evaluation.n, -1) for name, rows in gradients.items()})
    return found


def rows_by_loop(
    evaluation: Evaluation, names: tuple[str, ...], count: int
) -> list[dict[str, Tensor]]:
    """The same from one forward pass a sample and one backward pass a row."""
    found: list[dict[str, list[Tensor]]] = [{name: [] for name in names} for _ in range(count)]
    for i in range(evaluation.n):
        leaves = evaluation.leaves(names)
        scalars = evaluation.select(slice(i, i + 1)).scalars(leaves)
        for column, scalar in enumerate(scalars.reshape(-1)):
            gradients = gradients_of(scalar, leaves)
            for name, leaf in leaves.items():
                gradient = gradients[name]
                row = torch.zeros_like(leaf) if gradient is None else gradient
                found[column][name].append(row.flatten())
    return [{name: torch.stack(rows) for name, rows in of.items()} for of in found]


def gradients_of(scalar: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The gradient with respect to each leaf, None where the scalar does not depend on it."""
    if not scalar.requires_grad:
        return dict.fromkeys(leaves)
    gradients = torch.autograd.grad(
        scalar, list(leaves.values()), allow_unused=True, retain_graph=True
    )
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]
    return dict(zip(leaves, dense, strict=True))


@final
@dataclass(frozen=True)
class AutogradCheck:
    """Gradients of Σ_ik w_ik s_ik by autograd, with random weights w, to check any rows against.

    Samples do not interact, so the gradient is Σ_ik w_ik φ_ik however the network lays its samples
    out. A rule that took other things for samples (time steps, say) gives a different sum for all
    w but a set of measure zero.
    """

    weights: Tensor  # (n, K)
    gradients: Mapping[str, Tensor | None]
    lengths: Mapping[str, float]  # of the gradients
    # Some gradients are zero but for rounding (of the keys' bias in attention): the rounding of
    # everything else is their measure.
    rounding: float
    eps: float  # of the coarsest precision in which a layer computed

    def confirms(self, name: str, blocks: list[Block]) -> bool:
        """Whether the blocks (one a scalar) of a parameter give that sum, up to rounding."""
        return name in self.confirmed({name: blocks})

    def confirmed(self, several: Mapping[str, list[Block]]) -> list[str]:
        """The parameters whose blocks it confirms; a GPU is asked once for all."""
        errors = _numbers([self._error(name, blocks) for name, blocks in several.items()])
        share = min(0.1, 20 * self.eps**0.5)
        return [
            name
            for name, error in zip(several, errors, strict=True)
            if error <= share * self.lengths[name] + self.rounding
        ]

    def _error(self, name: str, blocks: list[Block]) -> Tensor:
        found = self.weights.new_zeros(1, blocks[0].size)
        for block, weights in zip(blocks, self.weights.T, strict=True):
            block.add_combined(weights.unsqueeze(0), found)
        if (gradient := self.gradients[name]) is not None:
            found = found - gradient.reshape(1, -1)
        error: Tensor = found.norm()
        return error


def _numbers(scalars: list[Tensor]) -> list[float]:
    """Scalars of one device as numbers, brought over together."""
    found: list[float] = torch.stack([float64(s) for s in scalars]).tolist() if scalars else []
    return found


def autograd_check(
    scalars: Tensor, leaves: Mapping[str, Tensor], outputs: Sequence[Tensor]
) -> AutogradCheck:
    """What autograd finds.

    Arguments:
        scalars: (n, K).
        leaves: the parameters.
        outputs: of the layers on the way.
    """
    generator = torch.Generator().manual_seed(len(scalars))
    weights = torch.rand(scalars.shape, generator=generator) + 0.5
    weights *= torch.randint(0, 2, scalars.shape, generator=generator) * 2 - 1
    weights = weights.to(scalars)
    gradients = gradients_of((weights * scalars).sum(), leaves)
    there = {name: g for name, g in gradients.items() if g is not None}
    lengths = dict.fromkeys(gradients, 0.0)
    lengths |= zip(there, _numbers([g.norm() for g in there.values()]), strict=True)
    eps = max(torch.finfo(t.dtype).eps for t in (weights, *outputs))
    return AutogradCheck(weights, gradients, lengths, 30 * eps * hypot(*lengths.values()), eps)


# Of what these are given besides the tensor itself they take the type or the shape.
_LIKE_ANOTHER = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}


@final
class ParameterUses(TorchFunctionMode):
    """Within it, every use of a parameter is seen that gradients flow through.

    A layer's rule knows of the layer's own runs. That a weight is used once more, as of an
    embedding whose weight also makes the logits, may hardly show in its gradient; here it does.

    Arguments:
        leaves: the parameters by name, as the network is called with them.
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.elsewhere: set[str] = set()  # parameters that something else than their layers uses
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self._running: list[Collection[str]] = []

    def begin(self, names: Collection[str]) -> None:
        """From now on a layer runs whose parameters these are."""
        self._running.append(names)

    def end(self) -> None:
        """It has run."""
        self._running.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        found = func(*args, **given)
        counted = args[:1] if func in _LIKE_ANOTHER else (args, given)
        used = {self._names.get(id(_unwrapped(tensor))) for tensor in _tensors(counted)} - {None}
        if used and (_transforms() or any(tensor.requires_grad for tensor in _tensors(found))):
            own = self._running[-1] if self._running else ()
            self.elsewhere |= {name for name in used if name is not None and name not in own}
        return found


def _transforms() -> bool:
    """Whether within a transformation of `torch.func`, which hides if gradients flow."""
    return functorch.peek_interpreter_stack() is not None


def _unwrapped(tensor: Tensor) -> Tensor:
    """What is inside of the tensors that `torch.func`'s transformations hand to a function."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
