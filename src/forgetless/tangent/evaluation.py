"""A network evaluated at given weights: stateless calls, scalars of samples, autograd on both.

Gradient checkpointing recomputes parts of a network in the backward pass. By then the module has
its own weights back, which would give their gradients: calls here disable checkpoints. Recurrent
layers in eval mode run without cuDNN, which has no backward pass for them.

Rows of φ by autograd, one sample at a time or by vmap, are the reference that rules are checked
against, and the way for layers without a rule.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import chain
from math import hypot
from threading import Lock
from types import FunctionType
from typing import Any, Self, final

import torch
import torch._C._functorch as functorch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import linear, multi_head_attention_forward
from torch.overrides import TorchFunctionMode

from forgetless.linalg import float64
from forgetless.tangent.blocks import Block

# What `torch.utils.checkpoint.checkpoint` calls, without and with `use_reentrant`.
_GENERATOR, _FUNCTION = "_checkpoint_without_reentrant_generator", "CheckpointFunction"


def call_with(
    module: nn.Module,
    values: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Outputs of the module with these parameters and buffers in place of its own.

    A value replaces the named tensor under all of its names, except those that are given too.
    """
    kernels = differentiable(module) if torch.is_grad_enabled() else nullcontext()
    with _WITHOUT_CHECKPOINTS(), kernels:
        placed = _placed(module, values)
        return functional_call(module, placed, args, dict(kwargs or {}), tie_weights=False)


def true_class(outputs: Tensor, labels: Tensor) -> Tensor:
    """The output of each sample's own class: (n, C), (n,) → (n,)."""
    return outputs.gather(1, labels.long().unsqueeze(1)).squeeze(1)


def eval_mode(module: nn.Module) -> AbstractContextManager[None]:
    """All modules in eval mode; their previous modes are restored afterwards."""
    return _modes(dict.fromkeys(module.modules(), False))


@contextmanager
def _modes(modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Each module's `training` flag set, and restored afterwards."""
    before = {module: module.training for module in modes}
    try:
        for module, training in modes.items():
            module.training = training
        yield
    finally:
        for module, training in before.items():
            module.training = training


def differentiable(module: nn.Module) -> AbstractContextManager[None]:
    """Disable cuDNN if the module has recurrent layers in eval mode."""
    if any(isinstance(part, nn.RNNBase) and not part.training for part in module.modules()):
        return without_cudnn()
    return nullcontext()


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Use torch's own kernels."""
    cudnn = torch.backends.cudnn  # its `flags` would reset other settings
    before = cudnn.enabled
    cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = before


def _placed(module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values, by one name for each place that holds a tensor of the module.

    A layer that is registered twice has two names for one place. Given both, `functional_call`
    restores the place only once, and a value remains in it.
    """
    names: dict[tuple[int, str], str] = {}
    held: dict[tuple[int, str], int] = {}
    named: dict[tuple[int, str], Tensor] = {}
    shared: dict[int, Tensor] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for own, tensor in chain(owner._parameters.items(), owner._buffers.items()):
            if tensor is None:
                continue
            name, place = f"{prefix}.{own}" if prefix else own, (id(owner), own)
            names.setdefault(place, name)
            held[place] = id(tensor)
            if name in values:
                named.setdefault(place, values[name])
                shared.setdefault(id(tensor), values[name])
    return {
        name: named[place] if place in named else shared[held[place]]
        for place, name in names.items()
        if held[place] in shared
    }


@final
class _WithoutCheckpoints:
    """A context in which this thread checkpoints nothing."""

    def __init__(self) -> None:
        self._disabled = ContextVar("checkpoints disabled", default=False)
        self._lock = Lock()
        self._entered = 0  # in all threads
        self._originals: dict[str, Any] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._entered == 0:
                self._install()
            self._entered += 1
        token = self._disabled.set(True)
        try:
            yield
        finally:
            self._disabled.reset(token)
            with self._lock:
                self._entered -= 1
                if self._entered == 0:
                    for name, original in self._originals.items():
                        setattr(torch.utils.checkpoint, name, original)

    def _install(self) -> None:
        names = [n for n in (_GENERATOR, _FUNCTION) if hasattr(torch.utils.checkpoint, n)]
        self._originals = {name: getattr(torch.utils.checkpoint, name) for name in names}
        disabled, originals = self._disabled, self._originals

        def around(*args: Any, **kwargs: Any) -> Iterator[None]:
            """A generator that yields where the checkpointed part runs."""
            if disabled.get():
                yield
            else:
                yield from originals[_GENERATOR](*args, **kwargs)

        class Function:
            @staticmethod
            def apply(part: Callable[..., Any], preserve: bool, *args: Any) -> Any:
                if disabled.get():
                    return part(*args)
                return originals[_FUNCTION].apply(part, preserve, *args)

        for name, other in ((_GENERATOR, around), (_FUNCTION, Function)):
            if name in self._originals:
                setattr(torch.utils.checkpoint, name, other)


_WITHOUT_CHECKPOINTS = _WithoutCheckpoints()


# outputs of n samples and their targets → (n,), or (n, K) for K scalars per sample
Scalar = Callable[..., Tensor]


@final
@dataclass(frozen=True)
class Batch:
    """Samples as a network takes them.

    Arguments:
        args, kwargs: positional and keyword arguments, tensors (n, *).
        targets: tensors (n, *) that belong to the samples, such as labels.
    """

    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor]
    targets: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len((*self.args, *self.kwargs.values())[0])

    def select(self, samples: slice) -> Self:
        """Some of the samples."""
        return replace(
            self,
            args=tuple(a[samples] for a in self.args),
            kwargs={key: a[samples] for key, a in self.kwargs.items()},
            targets=tuple(b[samples] for b in self.targets),
        )


@final
@dataclass(frozen=True)
class Evaluation:
    """K scalars of each of n samples as functions of the parameters `names`.

    Arguments:
        module: the network; only its structure counts, not its present weights or modes.
        values: its parameters and buffers, by name.
        modes: each of its modules' `training` flag.
        names: the parameters, in the order of the columns of φ.
        batch: the samples.
        scalar: from the network's outputs and the targets to (n,) or (n, K).
        in_place: whether the module runs with the parameters that it has, as one must that gathers
            them by itself; `values` then only have their shapes.
    """

    module: nn.Module
    values: Mapping[str, Tensor]
    modes: Mapping[nn.Module, bool]
    names: tuple[str, ...]
    batch: Batch
    scalar: Scalar
    in_place: bool = False

    @classmethod
    def at(
        cls,
        module: nn.Module,
        values: Mapping[str, Tensor],
        names: Sequence[str],
        batch: Batch,
        scalar: Scalar,
        *,
        lasting: bool = False,
        in_place: bool = False,
    ) -> Self:
        """At these values, in the modules' present modes.

        Arguments:
            lasting: the values will not be changed; otherwise they are copied.
            in_place: see the class.
        """
        modes = {m: m.training for m in module.modules()}
        with torch.inference_mode(False):
            copies = {n: v.detach() if lasting else v.detach().clone() for n, v in values.items()}
        return cls(module, copies, modes, tuple(names), batch, scalar, in_place).on(batch)

    def on(self, batch: Batch) -> Self:
        """The same for other samples."""
        with torch.inference_mode(False):
            args = tuple(_usable(a) for a in batch.args)
            kwargs = {key: _usable(a) for key, a in batch.kwargs.items()}
        return replace(self, batch=Batch(args, kwargs, batch.targets))

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.batch)

    def select(self, samples: slice) -> Self:
        """The same for some of the samples."""
        return replace(self, batch=self.batch.select(samples))

    def leaves(self, names: tuple[str, ...] | None = None) -> dict[str, Tensor]:
        """The parameters as new leaves to differentiate with respect to; none in place."""
        names = () if self.in_place else self.names if names is None else names
        return {name: self.values[name].detach().requires_grad_() for name in names}

    def outputs(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """The network's outputs."""
        values = {} if self.in_place else {**self.values, **leaves}
        outputs: Tensor = call_with(self.module, values, self.batch.args, self.batch.kwargs)
        return outputs

    def scalars(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """(n, K)."""
        scalars = self.scalar(self.outputs(leaves), *self.batch.targets)
        return scalars.unsqueeze(1) if scalars.dim() == 1 else scalars

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run with the modules in these modes, and gradients recorded."""
        with _modes(self.modes), torch.inference_mode(False), torch.enable_grad():
            yield


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two runs differ by no more than rounding."""
    tolerance = min(0.1, 20 * _eps(a.dtype) ** 0.5)
    return bool((a - b).norm() <= tolerance * a.norm() + torch.finfo(a.dtype).tiny)


def _eps(*dtypes: torch.dtype) -> float:
    """The rounding of the lowest precision in which a network may have computed.

    The norms of transformers compute in float32, also where inputs and outputs are float64.
    """
    return max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes))


def _usable(x: Tensor) -> Tensor:
    """The tensor without its history, as autograd can save it."""
    return x.clone() if x.is_inference() else x.detach()


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

    weights: Tensor  # (n, K), of some first samples
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
        found = self.weights.new_empty(1, blocks[0].size)
        for number, (block, weights) in enumerate(zip(blocks, self.weights.T, strict=True)):
            few = block.first(len(weights))
            few.add_combined(weights.unsqueeze(0), found, beta=min(1, number))
        if (gradient := self.gradients[name]) is not None:
            found -= gradient.reshape(1, -1)
        error: Tensor = found.norm()
        return error


def _numbers(scalars: list[Tensor]) -> list[float]:
    """Scalars of one device as numbers, in one transfer."""
    found: list[float] = torch.stack([float64(s) for s in scalars]).tolist() if scalars else []
    return found


def autograd_check(
    scalars: Tensor, leaves: Mapping[str, Tensor], outputs: Sequence[Tensor]
) -> AutogradCheck:
    """The check for scalars (n, K) of these parameters, with the layers' outputs.

    Blocks may be of more samples: their first n are compared.
    """
    generator = torch.Generator().manual_seed(len(scalars))
    weights = torch.rand(scalars.shape, generator=generator) + 0.5
    weights *= torch.randint(0, 2, scalars.shape, generator=generator) * 2 - 1
    weights = weights.to(scalars)
    gradients = gradients_of((weights * scalars).sum(), leaves)
    there = {name: g for name, g in gradients.items() if g is not None}
    lengths = dict.fromkeys(gradients, 0.0)
    lengths |= zip(there, _numbers([g.norm() for g in there.values()]), strict=True)
    eps = _eps(weights.dtype, *(t.dtype for t in outputs))
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

    def learn(self, tensors: Mapping[str, Tensor]) -> None:
        """Further parameters, by name, such as those that a layer has just gathered."""
        self._names |= {id(tensor): name for name, tensor in tensors.items()}

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
