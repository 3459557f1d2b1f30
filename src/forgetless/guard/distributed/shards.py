"""The state of a guard of a sharded model: each parameter's columns as a tensor of their own.

Such tensors are sharded like the parameter, so `torch.distributed.checkpoint` writes each part
once and brings it to any other number of processes. All else is on every process, and is kept as
by one process alone.
"""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from forgetless.guard.distributed.sharding import here, is_sharded, whole
from forgetless.guard.parameters import Parameters
from forgetless.guard.state import COLUMNS, HEADER, MEMORY, header_of
from forgetless.support.errors import ConfigError
from forgetless.tangent import ParameterSlice

_OF = "/"  # between what is kept and the parameter that it is kept of


def to_shards(tensors: Mapping[str, Tensor], parameters: Parameters) -> dict[str, Tensor]:
    """What `state.to_dict` gave on this process, as parts of one state."""
    if parameters.shares is None:
        return dict(tensors)
    found = dict(tensors)
    header = header_of(found)
    total = sum(map(prod, parameters.shapes.values()))
    for kept in COLUMNS:
        if MEMORY + kept not in found:
            continue
        columns = found.pop(MEMORY + kept)  # (*, p), of which p are here
        header["memory"][kept][0][-1] = total
        for (name, share), some, like in zip(
            parameters.shares.items(), parameters.columns, parameters.tensors, strict=True
        ):
            part = columns[..., some].unflatten(-1, share.shape_here).contiguous()
            found[f"{MEMORY}{kept}{_OF}{name}"] = _sharded(part, share, like)
    return found | {HEADER: _text(header)}


def from_shards(tensors: Mapping[str, Tensor], parameters: Parameters) -> Mapping[str, Tensor]:
    """A state of one or of many processes, as `state.from_dict` takes it on this one."""
    header = header_of(tensors)
    known = [(name, list(shape)) for name, shape in parameters.shapes.items()]
    theirs = header.get("parameters")
    fits = isinstance(theirs, Mapping) and list(theirs.items()) == known
    if not fits or not (parameters.shares or any(map(_is_piece, tensors))):
        return tensors
    found = {name: t for name, t in tensors.items() if not _is_piece(name)}
    try:
        for kept, described in header["memory"].items():
            if kept in COLUMNS:
                joined = torch.cat(_parts(tensors, kept, parameters), -1)
                width = parameters.size if parameters.shares else described[0][-1]
                found[MEMORY + kept] = joined
                if [*joined.shape] != [*described[0][:-1], width]:
                    raise ConfigError(f"the state is damaged: {kept} is {list(joined.shape)}")
                described[0][-1] = width
    except (LookupError, AttributeError, TypeError, RuntimeError) as error:
        raise ConfigError(f"the state is damaged or incomplete: {error!r}") from error
    return found | {HEADER: _text(header)}


def _is_piece(name: object) -> bool:
    return str(name).startswith(tuple(f"{MEMORY}{kept}{_OF}" for kept in COLUMNS))


def _parts(tensors: Mapping[str, Tensor], kept: str, parameters: Parameters) -> list[Tensor]:
    """Of each parameter, what belongs here: (*, size)."""
    names = [f"{MEMORY}{kept}{_OF}{name}" for name in parameters.names]
    shapes = list(parameters.shapes.values())
    if MEMORY + kept in tensors:
        pieces = list(tensors[MEMORY + kept].split([prod(s) for s in shapes], dim=-1))
        pieces = [piece.unflatten(-1, shape) for piece, shape in zip(pieces, shapes, strict=True)]
    else:
        missing = next((name for name in names if name not in tensors), None)
        if missing is not None:
            raise ConfigError(f"the state is damaged: {missing} is missing")
        pieces = [tensors[name] for name in names]
    found = []
    for name, shape, piece in zip(parameters.names, shapes, pieces, strict=True):
        lead = piece.dim() - len(shape)
        if tuple(piece.shape[lead:]) != shape:
            raise ConfigError(f"the state is damaged: {kept} of {name} is {list(piece.shape)}")
        share = None if parameters.shares is None else parameters.shares[name]
        found.append(_part(piece, lead, share))
    return found


def _part(piece: Tensor, lead: int, share: ParameterSlice | None) -> Tensor:
    if share is not None and is_sharded(piece):
        local = here(piece)
        if tuple(local.shape[lead:]) == share.shape_here:
            return local.flatten(lead)
    everything = whole(piece)
    if share is not None:
        length = share.stop - share.start
        everything = everything.narrow(lead + share.dim, share.start, length)
    return everything.flatten(lead)


def sharded_template(name: str, shape: torch.Size, dtype: torch.dtype, own: Parameters) -> Tensor:
    """An empty tensor that a stored one of this name and shape can be read into, part by part."""
    parameter = name.partition(_OF)[2]
    share = None if own.shares is None else own.shares.get(parameter)
    lead = len(shape) - (0 if share is None else len(share.shape))
    if share is None or tuple(shape[lead:]) != share.shape:
        return torch.zeros(shape, dtype=dtype, device=own.device)
    part = torch.zeros(*shape[:lead], *share.shape_here, dtype=dtype, device=own.device)
    return _sharded(part, share, own.tensors[own.names.index(parameter)])


def _sharded(part: Tensor, share: ParameterSlice, like: Any) -> Tensor:
    """The part (*, of a parameter) that is here, as one of a tensor (*, parameter)."""
    from torch.distributed.tensor import DTensor, Shard

    lead = part.dim() - len(share.shape)
    shape = torch.Size((*part.shape[:lead], *share.shape))
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    made: Tensor = DTensor.from_local(
        part, like.device_mesh, [Shard(lead + share.dim)], shape=shape, stride=stride
    )
    return made


def _text(header: Mapping[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
