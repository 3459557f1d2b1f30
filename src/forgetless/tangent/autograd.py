"""Autograd as the reference: rows by vmap or a loop, the check of rules, uses of parameters."""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from types import FunctionType
from typing import Any, final

import torch
import torch._C._functorch as functorch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.functional import linear, multi_head_attention_forward
from torch.overrides import TorchFunctionMode

from forgetless.linalg import float64
from forgetless.tangent.blocks import Block
from forgetless.tangent.evaluation import Evaluation, call_with

# Raised by vmap if it does not support an operation or a branch on data.
VMAP_ERRORS = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, KeyError)


def rows_by_vmap(
    evaluation: Evaluation, names: tuple[str, ...], count: int
) -> list[dict[str, Tensor]]:
    """The named parameters' gradients (n, size), for each of the K scalars, by vmap."""

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
    batch = evaluation.batch
    samples = batch.args, dict(batch.kwargs), batch.targets
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about slow batching rules
        for column in range(count):
            per_sample = vmap(grad(of_one), in_dims=(None, 0, 0, 0, None))
            gradients = per_sample(leaves, *samples, column)
            found.append({name: rows.reshape(evaluation.n, -1) for name, rows in gradients.items()})
    return found


def rows_by_loop(
    evaluation: Evaluation, names: tuple[str, ...], count: int
) -> list[dict[str, Tensor]]:
    """The same, with one forward pass per sample and one backward pass per row."""
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
    """The gradient with respect to each leaf, None if the scalar does not depend on it."""
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
    """The gradient of Σ_ik w_ik s_ik by autograd, with random weights w, to check rows against.

    Samples do not interact, so it is Σ_ik w_ik φ_ik wherever the network has its samples. A rule
    that mistook another dimension (time steps, say) for samples gives a different sum for almost
    all w.
    """

    weights: Tensor  # (n, K)
    gradients: Mapping[str, Tensor | None]
    lengths: Mapping[str, float]  # of the gradients
    # Some gradients are zero up to rounding (of the keys' bias in attention): compare these with
    # the rounding of all gradients.
    rounding: float
    eps: float  # of the lowest precision in which a layer computed

    def confirms(self, name: str, blocks: list[Block]) -> bool:
        """Whether a parameter's blocks (one per scalar) give that sum, up to rounding."""
        return name in self.confirmed({name: blocks})

    def confirmed(self, several: Mapping[str, list[Block]]) -> list[str]:
        """The parameters whose blocks are confirmed, with one transfer from a GPU."""
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
    """Scalars of one device as numbers, in one transfer."""
    found: list[float] = torch.stack([float64(s) for s in scalars]).tolist() if scalars else []
    return found


def autograd_check(
    scalars: Tensor, leaves: Mapping[str, Tensor], outputs: Sequence[Tensor]
) -> AutogradCheck:
    """The check for scalars (n, K) of these parameters, with the layers' outputs."""
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


# Attention asks whether a mode is active, and then shows it the call alone, not its products.
_ATTENTION = FunctionType(
    multi_head_attention_forward.__code__,
    {**multi_head_attention_forward.__globals__, "has_torch_function": lambda tensors: False},
    argdefs=multi_head_attention_forward.__defaults__,
)

# Of their second argument these functions take only the type or the shape.
_LIKE_ANOTHER = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}


@final
@dataclass(frozen=True)
class Product:
    """A product x Wᵀ + b by `linear` that a larger layer, such as attention, computes itself.

    Arguments:
        own: the names of W and b.
        tell: what is called with x and the product.
    """

    own: Collection[str]
    tell: Callable[[Tensor, Tensor], None]


@final
class ParameterUses(TorchFunctionMode):
    """A context that notes every use of a parameter that gradients flow through.

    A layer's rule sees the layer's own runs only. Another use of its weight, such as of an
    embedding's as output layer, may hardly change the gradient: the check could miss it.

    Arguments:
        leaves: the parameters by name, as the network is called with them.
        products: by weight, those that are not in a layer's run, and yet no other uses.
    """

    def __init__(
        self, leaves: Mapping[str, Tensor], products: Mapping[str, Product] | None = None
    ) -> None:
        super().__init__()
        self._products = products or {}
        self.elsewhere: set[str] = set()  # parameters used outside of their layers
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self._running: list[Collection[str]] = []

    def begin(self, names: Collection[str]) -> None:
        """A layer with these parameters starts to run."""
        self._running.append(names)

    def end(self) -> None:
        """The layer has run."""
        self._running.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is multi_head_attention_forward and self._products:
            with self:
                return _ATTENTION(*args, **given)
        found = func(*args, **given)
        counted = args[:1] if func in _LIKE_ANOTHER else (args, given)
        used = {self._names.get(id(_unwrapped(tensor))) for tensor in _tensors(counted)} - {None}
        if used and (_transforms() or any(tensor.requires_grad for tensor in _tensors(found))):
            own = self._running[-1] if self._running else self._told(func, args, found)
            self.elsewhere |= {name for name in used if name is not None and name not in own}
        return found

    def _told(
        self, func: Callable[..., Any], args: tuple[Any, ...], output: Any
    ) -> Collection[str]:
        """The names of W and b, if this is one of the products; then it is told."""
        name = self._names.get(id(args[1]), "") if func is linear and len(args) > 1 else ""
        if name not in self._products:
            return ()
        self._products[name].tell(args[0], output)
        return self._products[name].own


def _transforms() -> bool:
    """Whether inside a `torch.func` transformation, which hides whether gradients flow."""
    return functorch.peek_interpreter_stack() is not None


def _unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of `torch.func`'s transformations."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
