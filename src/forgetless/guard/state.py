"""A guard's memory as a dictionary of tensors, and back."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from forgetless.guard.batches.samples import Remembered
from forgetless.guard.parameters import Parameters
from forgetless.methods import Method, State
from forgetless.subspace import Storage
from forgetless.support.collectives import Ranks
from forgetless.support.errors import ConfigError

_FORMAT = 1
_GENERATORS = 2  # of a guard: one chooses samples to remember, one memory batches
_MOST_TASKS = 100_000  # whatever goes through them must come to an end
HEADER, MEMORY, _RANDOM = "header", "memory.", "generators"
# What has a number for every protected weight, in its last dimension.
COLUMNS = ("directions", "fisher", "anchor")


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
    memory = snapshot.state.tensors(0)
    header = {
        "format": _FORMAT,
        "method": method.name,
        "hyperparameters": asdict(method),  # type: ignore[call-overload]
        "parameters": parameters.shapes,
        "tasks": snapshot.tasks,
        "notes": snapshot.notes,
        "memory": {name: _kind(t) for name, t in memory.items()},
        "storage": snapshot.storage.described(),
    }
    text = json.dumps(header, default=str).encode()
    tensors = {
        HEADER: torch.frombuffer(bytearray(text), dtype=torch.uint8),
        _RANDOM: snapshot.generators,
    }
    # Tensors of one file must not share memory.
    return tensors | {MEMORY + n: t.detach().contiguous().clone() for n, t in memory.items()}


def from_dict(
    tensors: Mapping[str, Tensor],
    method: Method[Any],
    parameters: Parameters,
    ranks: Ranks | None = None,
) -> Snapshot:
    """What `to_dict` was given, on the device of the parameters; refused if it does not fit.

    The hyperparameters are those of the guard that saved it; this one goes on with its own.

    Arguments:
        ranks: the processes that each hold some columns; None if all are here.
    """
    header = header_of(tensors)
    try:
        name = header["method"]
        if name != method.name:
            raise ConfigError(f"the state is one of {name}, and this guard uses {method.name}")
        shapes = {n: tuple(shape) for n, shape in header["parameters"].items()}
        if list(shapes.items()) != list(parameters.shapes.items()):
            raise ConfigError(f"the state is for another model: {_difference(shapes, parameters)}")
        _check_memory(tensors, header["memory"])
        storage = replace(Storage.from_description(header["storage"]), ranks=ranks)
        memory = {
            n.removeprefix(MEMORY): t.detach().to(storage.device or parameters.device, copy=True)
            for n, t in tensors.items()
            if n.startswith(MEMORY)
        }
        state = method.restore([memory], parameters.read(), storage, Remembered.restore)
        _check_width(memory, parameters)
        generators = tensors[_RANDOM].cpu().clone()
        if len(generators) != _GENERATORS:
            raise ValueError(f"{len(generators)} generators instead of {_GENERATORS}")
        for one in generators:
            torch.Generator().set_state(one.clone())  # of a view it would read the wrong bytes
        tasks, notes = int(header["tasks"]), tuple(map(str, header["notes"]))
        if not 0 <= tasks <= _MOST_TASKS:
            raise ValueError(f"{tasks} tasks")
    except ConfigError:
        raise
    except (
        LookupError, AttributeError, TypeError, ValueError, RuntimeError, ArithmeticError
    ) as error:  # fmt: skip
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, KeyError):
            reason = f"{reason} is missing"
        raise ConfigError(f"the state is damaged or incomplete: {reason}") from error
    return Snapshot(state, storage, tasks, notes, generators)


def header_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a state says of itself, if this version can read it."""
    try:
        header: dict[str, Any] = json.loads(bytes(tensors[HEADER].cpu().tolist()))
        version = header["format"]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            "state_dict must be what a guard's state_dict() gave, and is not"
        ) from error
    if version != _FORMAT:
        raise ConfigError(f"the state has format {version}, this version reads {_FORMAT}")
    return header


def _kind(tensor: Tensor) -> list[object]:
    return [list(tensor.shape), str(tensor.dtype)[6:]]


def _check_memory(tensors: Mapping[str, Tensor], kinds: Mapping[str, list[object]]) -> None:
    """Refuse what has lost a tensor or a part of one."""
    there = {n.removeprefix(MEMORY): t for n, t in tensors.items() if n.startswith(MEMORY)}
    for name in [*kinds, *there]:
        found = _kind(there[name]) if name in there else "missing"
        if found != kinds.get(name):
            wanted = kinds.get(name, "no such tensor")
            raise ConfigError(f"the state is damaged: {name} is {found}, not {wanted}")


def _check_width(memory: Mapping[str, Tensor], parameters: Parameters) -> None:
    for name in COLUMNS:
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
