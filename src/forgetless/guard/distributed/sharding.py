"""Models that several processes train: the processes, and this one's part of each parameter."""

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from forgetless.linalg import ParameterSlice
from forgetless.methods import Method
from forgetless.support.collectives import Ranks
from forgetless.support.validation import ConfigError, warn_caller

# Bytes of rows that are broadcast at once, and exist twice meanwhile.
_BROADCAST = 1 << 28


def is_sharded(tensor: Tensor) -> TypeGuard[Any]:
    """Whether it is a `DTensor`, of which this process has a part."""
    module = sys.modules.get("torch.distributed.tensor")  # without it there can be none
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The local part of a tensor, all of it unless it is sharded; not for autograd."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
        return part


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor, from all processes if it is sharded."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        full: Tensor = tensor.full_tensor()
        return full


def local_slices(tensors: Mapping[str, Tensor]) -> dict[str, ParameterSlice] | None:
    """The local slice of each parameter; None for a model that is not sharded."""
    if not any(map(is_sharded, tensors.values())):
        return None
    return {name: _slice(name, tensor) for name, tensor in tensors.items()}


def _slice(name: str, tensor: Tensor) -> ParameterSlice:
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
        found = ParameterSlice(shape, dim, start, min(shape[dim], start + each))
        if found.shape_here == tuple(local(tensor).shape):
            return found
    raise ConfigError(
        f"{name} is laid out as {tuple(placements)} on a mesh of {mesh.ndim} dimensions: a guard "
        "accepts parameters that fully_shard cut along one dimension, on a mesh of one"
    )


def training_ranks(
    model: nn.Module,
    tensors: list[Tensor],
    method: Method[Any],
    group: Any = None,
) -> Ranks | None:
    """The processes that train the model together; None if this one is alone.

    Arguments:
        model: as the user gave it, wrapped or not.
        tensors: the protected parameters.
        method: rejected if it cannot work with a sharded model.
        group: the process group, if the model is not wrapped.
    """
    for module in model.modules():
        kind = type(module).__name__  # of packages that need not be installed
        if kind in ("FullyShardedDataParallel", "DeepSpeedEngine"):
            raise ConfigError(
                f"{kind} cannot be guarded: shard the model with "
                "torch.distributed.fsdp.fully_shard, which keeps parameters apart"
            )
    if any(hasattr(tensor, "ds_tensor") for tensor in tensors):
        raise ConfigError(
            "a model whose parameters DeepSpeed's ZeRO-3 has taken apart cannot be guarded: shard "
            "it with torch.distributed.fsdp.fully_shard"
        )
    first = tensors[0]
    if is_sharded(first):
        if method.needs_model:  # all weights would be gathered at every step
            raise ConfigError(
                f"{method.name} takes gradients on stored samples at every step, which a "
                "guard cannot take of a sharded model: use KronEWC, KronOGD, PCAOGD, OGD or EWC, "
                "or DistributedDataParallel"
            )
        if not (method.keeps_directions or method.separable or method.over_ranks):
            raise ConfigError(
                f"{method.name} may need all weights in one place, and a sharded model has them in "
                "several: say separable = True if its update treats each weight by itself, or use "
                "DistributedDataParallel"
            )
        return Ranks(first.device_mesh.get_group(), first.device)
    wrapped: Any = model
    while wrapped is not None:
        if isinstance(wrapped, DistributedDataParallel):
            return Ranks(wrapped.process_group, first.device)
        wrapped = getattr(wrapped, "_orig_mod", None)
    if group is not None:
        return Ranks(group, first.device)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warn_caller(
            "the model is neither in DistributedDataParallel nor sharded by fully_shard, though "
            "there are several processes: each stores tasks on its own; if they train one model, "
            "give the guard the wrapped one, or process_group="
        )
    return None


def broadcast_in_place(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Overwrite new tensors with the first rank's, since rounding may differ between processors."""
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.numel():
            rows = tensor if tensor.dim() else tensor.view(1)
            for part in rows.split(max(1, _BROADCAST // rows[0].nbytes)):
                part.copy_(ranks.broadcast(part))


def reshard(module: nn.Module) -> None:
    """Free the weights that a sharded model gathered for its latest forward pass."""
    for part in module.modules():
        if _is_fsdp(part):
            part.reshard()


def gathered_copy(module: nn.Module) -> nn.Module:
    """The same model, not sharded, with all of its weights; all processes must call it together.

    Modules and parameters are new, buffers are shared.
    """
    tensors: dict[int, nn.Parameter] = {}

    def copied_parameter(parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        if id(parameter) not in tensors:
            values = gathered(parameter.detach())
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
                mine = {k: hook for k, hook in old.__dict__[hooks].items() if not _of_fsdp(hook)}
                new.__dict__[hooks] = type(old.__dict__[hooks])(mine)
            parameters = {n: copied_parameter(p) for n, p in old._parameters.items()}
            new.__dict__["_parameters"] = parameters
            new.__dict__["_buffers"] = dict(old._buffers)
            new.__dict__["_modules"] = {
                name: None if child is None else copied(child)
                for name, child in old._modules.items()
            }
        return copies[old]

    return copied(module)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether a model, or a part of it, gathers its own weights when it is run."""
    return any(map(_is_fsdp, module.modules()))


def _is_fsdp(module: Any) -> TypeGuard[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it there can be none
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _of_fsdp(hook: Any) -> bool:
    owner = type(getattr(hook, "__self__", hook)).__module__
    return "torch.distributed.fsdp" in f"{owner} {getattr(hook, '__module__', '')}"
