"""What a user hands to a guard, checked."""

from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.optim import LBFGS, Optimizer

from forgetless.methods import Method
from forgetless.subspace import STORAGES, Storage
from forgetless.support.errors import ConfigError, require

Projected = Literal["update", "gradient"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` or a data-parallel wrapper was made of."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def usable_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer, out of a wrapper such as accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, not {kind}")
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "LBFGS cannot be guarded: it takes many steps in one call and learns its curvature "
            "from gradients of steps that would not have been taken"
        )
    return optimizer


def what_to_project(method: Method[Any], project: Projected | None) -> Projected:
    """The update where the method allows, unless the gradient is asked for."""
    accepted = "'update' or 'gradient'"
    require(project in (None, "update", "gradient"), "project", project, accepted)
    if project == "update" and not method.is_projection:
        raise ConfigError(f"{method.name} changes the gradient and cannot project the update")
    return project or ("update" if method.is_projection else "gradient")


def named_storage(storage: str | Storage | None, max_rank: int | None) -> Storage:
    """The storage of that name, with that limit."""
    if not isinstance(storage, Storage):
        accepted = f"{', '.join(map(repr, STORAGES))} or a Storage"
        known = storage is None or (isinstance(storage, str) and storage in STORAGES)
        require(known, "storage", storage, accepted)
        storage = STORAGES[storage or "dense"]
    return storage if max_rank is None else replace(storage, max_rank=max_rank)


def function(argument: str, value: Any) -> Any:
    """A function, or None."""
    require(value is None or callable(value), argument, value, "a function or None")
    return value
