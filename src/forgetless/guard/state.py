"""A guard's memory as a dictionary of tensors, and back."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor

from forgetless.errors import ConfigError
from forgetless.guard.batches import Remembered
from forgetless.guard.parameters import Parameters
from forgetless.methods import Method, State
from forgetless.subspace import Storage

_FORMAT = 1
_HEADER, _MEMORY, _RANDOM = "header", "memory.", "generators"


@final
@dataclass(frozen=True)
class Snapshot:
    """All that a guard has to keep.

    Arguments:
        state: the method's memory.
        storage: how directions are kept.
        tasks: how many were remembered.
        notes: what was given up for a budget.
        generators: states of the random generators, (g, bytes).
    """

    state: State
    storage: Storage
    tasks: int
    notes: tuple[str, ...]
    generators: Tensor


def to_dict(snapshot: Snapshot, method: Method[Any], parameters: Parameters) -> dict[str, Tensor]:
    """Every tensor by name; what is not a tensor as JSON text in one of bytes."""
    storage = snapshot.storage
    header = {
        "format": _FORMAT,
        "method": method.name,
        "hyperparameters": asdict(method),  # type: ignore[call-overload]
        "parameters": parameters.shapes,
        "tasks": snapshot.tasks,
        "notes": snapshot.notes,
        "storage": {
            "kind": storage.kind,
            "dtype": None if storage.dtype is None else str(storage.dtype)[6:],
            "device": None if storage.device is None else str(storage.device),
            "max_rank": storage.max_rank,
        },
    }
    text = json.dumps(header).encode()
    tensors = {
        _HEADER: torch.frombuffer(bytearray(text), dtype=torch.uint8),
        _RANDOM: snapshot.generators,
    }
    memory = snapshot.state.tensors(0)
    # Tensors of one file must not share memory.
    return tensors | {_MEMORY + n: t.detach().clone().contiguous() for n, t in memory.items()}


def from_dict(
    tensors: Mapping[str, Tensor], method: Method[Any], parameters: Parameters
) -> Snapshot:
    """What `to_dict` was given, on the device of the parameters; refused if it does not fit."""
    header = _header(tensors)
    name, hyperparameters = header["method"], header["hyperparameters"]
    if name != method.name:
        raise ConfigError(f"the state is one of {name}, and this guard uses {method.name}")
    shapes = {n: tuple(shape) for n, shape in header["parameters"].items()}
    if shapes != parameters.shapes:
        raise ConfigError(f"the state is for another model: {_difference(shapes, parameters)}")
    try:
        kept = dict(header["storage"])
        dtype, device = kept["dtype"], kept["device"]
        storage = Storage(
            kept["kind"],
            None if dtype is None else getattr(torch, dtype),
            None if device is None else torch.device(device),
            kept["max_rank"],
        )
        where = parameters.device
        memory = {
            n.removeprefix(_MEMORY): t if storage.device is not None else t.to(where)
            for n, t in tensors.items()
            if n.startswith(_MEMORY)
        }
        theta = parameters.read()
        state = method.restore([memory], theta, storage, Remembered.restore)
        generators = tensors[_RANDOM].cpu()
        _check_width(memory, parameters)
    except (KeyError, AttributeError, IndexError, TypeError, RuntimeError) as error:
        raise ConfigError(f"the state is damaged or incomplete: {error!r}") from error
    del hyperparameters  # of the guard that saved it; this one goes on with its own
    return Snapshot(state, storage, int(header["tasks"]), tuple(header["notes"]), generators)


def _header(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    try:
        header: dict[str, Any] = json.loads(bytes(tensors[_HEADER].cpu().tolist()))
        version = header["format"]
        _ = header["method"], header["hyperparameters"], header["parameters"], header["storage"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError("this is not the state of a guard") from error
    if version != _FORMAT:
        raise ConfigError(f"the state has format {version}, this version reads {_FORMAT}")
    return header


def _check_width(memory: Mapping[str, Tensor], parameters: Parameters) -> None:
    for name in ("directions", "fisher", "anchor"):
        if name in memory and memory[name].shape[-1] != parameters.size:
            raise ConfigError(
                f"the state is damaged: {name} has {memory[name].shape[-1]} columns, not "
                f"{parameters.size}"
            )


def _difference(shapes: Mapping[str, tuple[int, ...]], parameters: Parameters) -> str:
    here = parameters.shapes
    for name in [*shapes, *here]:
        there = shapes.get(name)
        if there != here.get(name):
            return (
                f"{name} is {'missing' if there is None else there} there and "
                f"{here.get(name, 'missing')} here"
            )
    return "the parameters come in another order"
