"""A network evaluated at given weights: stateless calls, modes restored, scalars of samples.

Gradient checkpointing recomputes parts of a network in the backward pass. By then the module has
its own weights back, which would give their gradients: calls here disable checkpoints. Recurrent
layers in eval mode run without cuDNN, which has no backward pass for them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import chain
from threading import Lock
from typing import Any, Self, final

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call

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
    """

    module: nn.Module
    values: Mapping[str, Tensor]
    modes: Mapping[nn.Module, bool]
    names: tuple[str, ...]
    batch: Batch
    scalar: Scalar

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
    ) -> Self:
        """At these values, in the modules' present modes.

        Arguments:
            lasting: the values will not be changed; otherwise they are copied.
        """
        modes = {m: m.training for m in module.modules()}
        with torch.inference_mode(False):
            copies = {n: v.detach() if lasting else v.detach().clone() for n, v in values.items()}
        return cls(module, copies, modes, tuple(names), batch, scalar).on(batch)

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
        """The parameters as new leaves to differentiate with respect to."""
        names = self.names if names is None else names
        return {name: self.values[name].detach().requires_grad_() for name in names}

    def outputs(self, leaves: Mapping[str, Tensor]) -> Tensor:
        """The network's outputs."""
        values = {**self.values, **leaves}
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
    tolerance = min(0.1, 20 * torch.finfo(a.dtype).eps ** 0.5)
    return bool((a - b).norm() <= tolerance * a.norm() + torch.finfo(a.dtype).tiny)


def _usable(x: Tensor) -> Tensor:
    """The tensor without its history, as autograd can save it."""
    return x.clone() if x.is_inference() else x.detach()
