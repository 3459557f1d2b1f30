"""A module called with other weights than its own, in a way that gradients can be taken of.

Gradient checkpointing computes parts of a network again in the backward pass. By then the module
has its own weights back, and the gradients would be theirs: while a module is called here, such
parts run as if they were not checkpointed. Recurrent layers in eval mode run without cuDNN, which
has no backward pass of them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import chain
from threading import Lock
from typing import Any, final

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call

# What `torch.utils.checkpoint.checkpoint` calls, without and with `use_reentrant`.
_GENERATOR, _FUNCTION = "_checkpoint_without_reentrant_generator", "CheckpointFunction"


def called(
    module: nn.Module,
    values: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """What the module returns with these parameters and buffers, by name, in place of its own.

    A value holds wherever the named tensor is used, under whatever name, unless that is named too.
    """
    with _PLAINLY(), differentiable(module) if torch.is_grad_enabled() else nullcontext():
        placed = _placed(module, values)
        return functional_call(module, placed, args, dict(kwargs or {}), tie_weights=False)


def differentiable(module: nn.Module) -> AbstractContextManager[None]:
    """Without cuDNN, if the module has recurrent layers in eval mode."""
    if any(isinstance(part, nn.RNNBase) and not part.training for part in module.modules()):
        return without_cudnn()
    return nullcontext()


@contextmanager
def without_cudnn() -> Iterator[None]:
    """By torch's own kernels; cuDNN's other settings stay, which its `flags` would reset."""
    cudnn = torch.backends.cudnn
    before = cudnn.enabled
    cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = before


def _placed(module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values by one name for each place that holds a tensor of the module.

    A layer that is registered twice has two names for one place. `functional_call` swaps both and
    gives the place its own tensor back only once, so that a value stays in it.
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
class _Plainly:
    """Within it, in this thread, nothing is checkpointed."""

    def __init__(self) -> None:
        self._here = ContextVar("runs plainly", default=False)
        self._lock = Lock()
        self._inside = 0  # in all threads
        self._originals: dict[str, Any] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._install()
            self._inside += 1
        token = self._here.set(True)
        try:
            yield
        finally:
            self._here.reset(token)
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    for name, original in self._originals.items():
                        setattr(torch.utils.checkpoint, name, original)

    def _install(self) -> None:
        names = [n for n in (_GENERATOR, _FUNCTION) if hasattr(torch.utils.checkpoint, n)]
        self._originals = {name: getattr(torch.utils.checkpoint, name) for name in names}
        here, originals = self._here, self._originals

        def around(*args: Any, **kwargs: Any) -> Iterator[None]:
            """What is done before and after a part runs, at the one place where it yields."""
            if here.get():
                yield
            else:
                yield from originals[_GENERATOR](*args, **kwargs)

        class Function:
            @staticmethod
            def apply(part: Callable[..., Any], preserve: bool, *args: Any) -> Any:
                plainly = here.get()
                return part(*args) if plainly else originals[_FUNCTION].apply(part, preserve, *args)

        for name, other in ((_GENERATOR, around), (_FUNCTION, Function)):
            if name in self._originals:
                setattr(torch.utils.checkpoint, name, other)


_PLAINLY = _Plainly()
