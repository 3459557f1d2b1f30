"""A model that several processes train: who they are, and which part of it each of them holds."""

import sys
import warnings
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from forgetless.methods import EWC, OGD, PCAOGD, SGD, Method
from forgetless.support.collectives import Ranks
from forgetless.support.errors import ConfigError
from forgetless.tangent import ParameterSlice

# They need no gradient on remembered samples at a step, for which all weights would be gathered.
_FOR_SHARDED = (OGD, PCAOGD, EWC, SGD)

# Bytes of rows that are sent at once, and are there twice meanwhile.
_SENT = 1 << 28


def is_sharded(tensor: Tensor) -> TypeGuard[Any]:
    """Whether it is a `DTensor`, of which this process has a part."""
    module = sys.modules.get("torch.distributed.tensor")  # without it there can be none
    return module is not None and isinstance(tensor, module.DTensor)


def here(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, all of it unless it is sharded; not for autograd."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
        return local


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, from all processes if it is sharded."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        gathered: Tensor = tensor.full_tensor()
        return gathered


def shares_of(tensors: Mapping[str, Tensor]) -> dict[str, ParameterSlice] | None:
    """The part of each parameter that is here; None for a model that is not sharded."""
    if not any(map(is_sharded, tensors.values())):
        return None
    return {name: _share(name, tensor) for name, tensor in tensors.items()}


def _share(name: str, tensor: Tensor) -> ParameterSlice:
    if not is_sharded(tensor):
        raise ConfigError(
            f"{name} is not sharded, and other protected parameters are: leave it out with "
            "exclude=, or let fully_shard have it"
        )
    mesh, placements = tensor.device_mesh, tensor.placements
    dim = getattr(placements[0], "dim", None)
    shape = tuple(tensor.shape)
    if mesh.ndim == 1 and dim is not None:
        # As `torch.chunk` cuts: the last processes may have less, or nothing.
        each = -(-shape[dim] // mesh.size())
        start = min(shape[dim], mesh.get_local_rank() * each)
        share = ParameterSlice(shape, dim, start, min(shape[dim], start + each))
        if share.shape_here == tuple(here(tensor).shape):
            return share
    raise ConfigError(
        f"{name} is laid out as {tuple(placements)} on a mesh of {mesh.ndim} dimensions: a guard "
        "knows parameters that fully_shard cut along one dimension, on a mesh of one"
    )


def training_ranks(model: nn.Module, tensors: list[Tensor], method: Method[Any]) -> Ranks | None:
    """The processes that train the model together; None if this one is alone.

    Arguments:
        model: as the user gave it, wrapped or not.
        tensors: the protected parameters.
        method: refused if it cannot work with a sharded model.
    """
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ConfigError(
                "FullyShardedDataParallel cannot be guarded: shard the model with "
                "torch.distributed.fsdp.fully_shard, which keeps parameters apart"
            )
    first = tensors[0]
    if is_sharded(first):
        if not isinstance(method, _FOR_SHARDED):
            raise ConfigError(
                f"{method.name} takes gradients on remembered samples at every step, which a "
                "guard cannot take of a sharded model: use PCAOGD, OGD or EWC, or "
                "DistributedDataParallel"
            )
        return Ranks(first.device_mesh.get_group(), first.device)
    wrapped: Any = model
    while wrapped is not None:
        if isinstance(wrapped, DistributedDataParallel):
            return Ranks(wrapped.process_group, first.device)
        wrapped = getattr(wrapped, "_orig_mod", None)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            "the model is neither in DistributedDataParallel nor sharded by fully_shard, though "
            "there are several processes: each will remember on its own; if they train one "
            "model, give the guard the wrapped one",
            stacklevel=3,
        )
    return None


def agreed(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """What the first rank found, on all: rounding may differ where processors do.

    The tensors were just made, and are written to where they are.
    """
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.numel():
            rows = tensor if tensor.dim() else tensor.view(1)
            for part in rows.split(max(1, _SENT // rows[0].nbytes)):
                part.copy_(ranks.agreed(part))


def settle(module: nn.Module) -> None:
    """Let go of what a sharded model gathered for its latest forward pass."""
    for part in module.modules():
        if _is_fsdp(part):
            part.reshard()


def plain_copy(module: nn.Module) -> nn.Module:
    """The same model with all of its weights here, and nothing that shards them.

    Modules and parameters are new, buffers are shared. All processes must call it together.
    """
    tensors: dict[int, nn.Parameter] = {}

    def gathered(parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in tensors:
            values = whole(parameter.detach())
            tensors[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
        return tensors[id(parameter)]

    copies: dict[nn.Module, nn.Module] = {}

    def copied(old: nn.Module) -> nn.Module:
        if old not in copies:
            # `fully_shard` puts a class of its own before the one that the module had.
            kind = type(old).__bases__[1] if _is_fsdp(old) else type(old)
            new: nn.Module = object.__new__(kind)
            copies[old] = new
            new.__dict__.update(old.__dict__)
            for hooks in ("_forward_hooks", "_forward_pre_hooks"):
                mine = {key: hook for key, hook in old.__dict__[hooks].items() if _is_other(hook)}
                new.__dict__[hooks] = type(old.__dict__[hooks])(mine)
            new.__dict__["_parameters"] = {n: gathered(p) for n, p in old._parameters.items()}
            new.__dict__["_buffers"] = dict(old._buffers)
            new.__dict__["_modules"] = {
                name: None if child is None else copied(child)
                for name, child in old._modules.items()
            }
        return copies[old]

    return copied(module)


def _is_fsdp(module: Any) -> TypeGuard[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it there can be none
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _is_other(hook: Any) -> bool:
    """Whether a hook is the user's, not the sharding's."""
    owner = type(getattr(hook, "__self__", hook)).__module__
    return "torch.distributed.fsdp" not in f"{owner} {getattr(hook, '__module__', '')}"
