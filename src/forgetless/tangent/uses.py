"""Where a network uses its parameters: in their layers' own runs, or somewhere else as well."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, final

import torch._C._functorch as functorch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Of what these are given besides the tensor itself they take the type or the shape.
_LIKE_ANOTHER = {Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as}


@final
class Uses(TorchFunctionMode):
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
