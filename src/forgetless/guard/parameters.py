"""The protected parameters of a user's model as one flat vector (1, p)."""

from collections.abc import Callable, Iterable, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgetless.errors import ConfigError, require
from forgetless.tangent import chosen_names

# None for all; names or prefixes of names, parameters or modules; a function of the name.
Params = nn.Module | str | Iterable[str | nn.Parameter | nn.Module] | Callable[[str], bool] | None


@final
class Parameters:
    """Reads and writes a model's parameters as one vector, in the order of `names`.

    Arguments:
        module: the model.
        names: the protected parameters.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        own = dict(module.named_parameters())
        self.names = tuple(names)
        self.tensors: list[Tensor] = [own[name] for name in names]
        self.shapes = {name: tuple(own[name].shape) for name in names}
        ends = torch.tensor([t.numel() for t in self.tensors]).cumsum(0).tolist()
        self.columns = [
            slice(end - t.numel(), end) for end, t in zip(ends, self.tensors, strict=True)
        ]
        self.size: int = ends[-1]

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        devices = {t.device for t in self.tensors}
        if len(devices) > 1:
            raise ConfigError(
                f"the protected parameters are on several devices: "
                f"{', '.join(sorted(map(str, devices)))}; choose those of one with params="
            )
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of the vector: at least float32, so that small steps of half-precision weights count."""
        dtype = torch.float32
        for tensor in self.tensors:
            dtype = torch.promote_types(dtype, tensor.dtype)
        return dtype

    def empty(self) -> Tensor:
        """A vector of no particular value, (1, p)."""
        return torch.empty(1, self.size, dtype=self.dtype, device=self.device)

    def views(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector (1, p) in the parameters' shapes."""
        pairs = zip(self.columns, self.tensors, strict=True)
        return [vector[0, columns].view(t.shape) for columns, t in pairs]

    def read(self, out: Tensor | None = None) -> Tensor:
        """The parameters, (1, p)."""
        out = self.empty() if out is None else out
        with torch.no_grad():
            torch._foreach_copy_(self.views(out), self.tensors)
        return out

    def write(self, vector: Tensor) -> None:
        """Set the parameters."""
        with torch.no_grad():
            torch._foreach_copy_(self.tensors, self.views(vector))

    def movable(self) -> tuple[int, ...]:
        """Which parameters an optimizer moves now: those that have a gradient."""
        return tuple(
            i for i, t in enumerate(self.tensors) if t.requires_grad and t.grad is not None
        )

    def gradients(self) -> Tensor:
        """The gradients, (1, p), zero where there is none."""
        out = self.empty().zero_()
        for view, tensor, name in zip(self.views(out), self.tensors, self.names, strict=True):
            if tensor.grad is not None:
                if tensor.grad.is_sparse:
                    raise ConfigError(
                        f"the gradient of {name} is sparse: use project='update', or a layer "
                        "with sparse=False"
                    )
                view.copy_(tensor.grad)
        return out

    def write_gradients(self, vector: Tensor) -> None:
        """Set the gradients of parameters that have one."""
        for view, tensor in zip(self.views(vector), self.tensors, strict=True):
            if tensor.grad is not None:
                tensor.grad.copy_(view)


def protected_names(
    module: nn.Module, optimizer: Optimizer, params: Params, exclude: Sequence[str]
) -> tuple[str, ...]:
    """The parameters that are chosen, trained by the optimizer, and not excluded."""
    own = dict(module.named_parameters())
    if not isinstance(params, str | nn.Module | Iterable) and callable(params):
        chosen = [name for name in own if params(name)]
    elif params is None:
        chosen = list(own)
    else:
        chosen = list(chosen_names(module, _spelled(params)))
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for prefix in (exclude,) if isinstance(exclude, str) else exclude:
        known = any(_within(name, prefix) for name in own)
        require(known, "exclude", prefix, "a name or the beginning of one, such as 'head'")
        chosen = [name for name in chosen if not _within(name, prefix)]
    names = [n for n in chosen if own[n].requires_grad and id(own[n]) in trained]
    if not names:
        raise ConfigError(
            "there is nothing to protect: none of the chosen parameters is in the optimizer and "
            "requires a gradient"
        )
    for name in names:
        real = own[name].is_floating_point()
        require(real, f"the parameter {name}", str(own[name].dtype), "of real numbers")
    return tuple(names)


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _spelled(
    params: nn.Module | str | Iterable[str | nn.Parameter | nn.Module],
) -> nn.Module | str | list[str | nn.Parameter]:
    """Modules among the choices as their parameters."""
    if isinstance(params, nn.Module | str | nn.Parameter):
        return [params] if isinstance(params, nn.Parameter) else params
    spelled: list[str | nn.Parameter] = []
    for one in params:
        spelled += list(one.parameters()) if isinstance(one, nn.Module) else [one]
    return spelled
