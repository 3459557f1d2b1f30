"""A guard's state as a dictionary of tensors, and back, within a number of bytes.

In the state of a sharded model the columns of each parameter are a tensor of their own, sharded
like the parameter, so `torch.distributed.checkpoint` writes each part once and reads it on any
number of processes. Every process has all else.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, final

import torch
from torch import Tensor

from forgetless.guard.batches.samples import StoredSamples
from forgetless.guard.distributed.sharding import gathered, is_sharded, local
from forgetless.guard.parameters import Parameters
from forgetless.linalg import ParameterSlice
from forgetless.methods import Method
from forgetless.methods.state import STRUCTURE, check_state, restored_state, state_tensors
from forgetless.subspace import DENSE, FACTORED, STORAGES, Storage
from forgetless.subspace.storage import Footprint
from forgetless.support.collectives import Ranks
from forgetless.support.files import json_tensor, json_value
from forgetless.support.memory import require_memory
from forgetless.support.validation import ConfigError, NoSamplesError, first_line, require
from forgetless.tangent import TangentFeatures

_FORMAT = 1
_GENERATORS = 2  # of a guard: one for samples to store, one for memory batches
_MOST_TASKS = 100_000  # a damaged number must not start an endless loop
_HEADER, _MEMORY, _RANDOM, _KEPT = "header", "memory.", "generators", "kept."
_REST = "of rounding"  # beside the tensors of the method's state, whose names have no spaces
_OF = "/"  # between the name of a tensor and that of a parameter, whose columns these are


@final
@dataclass(frozen=True)
class Snapshot:
    """All that a guard stores.

    Arguments:
        state: the method's state.
        storage: how directions are stored.
        tasks: how many tasks are stored.
        steps: how many steps were taken.
        notes: what was given up for a budget.
        generators: states of the random generators, (g, bytes).
        kept: task → samples on which its drift is measured, with the outputs on them.
        rest: what weights of half precision could not hold of the steps, (1, p).
    """

    state: Any
    storage: Storage
    tasks: int
    steps: int
    notes: tuple[str, ...]
    generators: Tensor
    kept: Mapping[int, StoredSamples] = field(default_factory=dict)
    rest: Tensor | None = None


def to_dict(snapshot: Snapshot, method: Method[Any], parameters: Parameters) -> dict[str, Tensor]:
    """Every tensor by name, and one of bytes for a header in JSON."""
    memory = state_tensors(snapshot.state, 0)
    columns = _with_columns(memory, parameters.size)
    if snapshot.rest is not None:
        memory[_REST] = snapshot.rest
        columns.append(_REST)
    kept = {
        f"{task}.{name}": tensor
        for task, samples in snapshot.kept.items()
        for name, tensor in sorted(samples.tensors().items())  # as files have them
    }
    header = {
        "format": _FORMAT,
        "method": method.name,
        "hyperparameters": asdict(method),  # type: ignore[call-overload]
        "parameters": parameters.shapes,
        "tasks": snapshot.tasks,
        "steps": snapshot.steps,
        "notes": snapshot.notes,
        "memory": {name: _kind(t) for name, t in memory.items()},
        "kept": {name: _kind(t) for name, t in kept.items()},
        "columns": columns,
        "storage": snapshot.storage.described(),
    }
    tensors = {_RANDOM: snapshot.generators}
    # Tensors of one file must not share memory.
    named = {_MEMORY + n: t for n, t in memory.items()} | {_KEPT + n: t for n, t in kept.items()}
    tensors |= {n: t.detach().contiguous().clone() for n, t in named.items()}
    if parameters.slices is not None:
        tensors = _to_shards(tensors, header, parameters)
    return tensors | {_HEADER: json_tensor(header)}


def from_dict(
    tensors: Mapping[str, Tensor],
    method: Method[Any],
    parameters: Parameters,
    ranks: Ranks | None = None,
) -> Snapshot:
    """The inverse of `to_dict`, on the parameters' device; a state that does not fit is rejected.

    Hyperparameters may differ: a guard continues with its own.

    Arguments:
        ranks: the processes that each hold some columns; None if all are here.
    """
    header = _header_of(tensors)
    try:
        tensors = _from_shards(tensors, header, parameters)
        name = header["method"]
        if name != method.name:
            raise ConfigError(f"the state is one of {name}, and this guard uses {method.name}")
        shapes = {n: tuple(shape) for n, shape in header["parameters"].items()}
        if list(shapes.items()) != list(parameters.shapes.items()):
            raise ConfigError(f"the state is for another model: {_difference(shapes, parameters)}")
        memory = _under(_MEMORY, tensors, header["memory"])
        for name in header["columns"]:
            if memory[name].shape[-1] != parameters.size:
                columns = f"{memory[name].shape[-1]} columns, not {parameters.size}"
                raise ConfigError(f"the state is damaged: {name} has {columns}")
        kept = _kept(_under(_KEPT, tensors, header.get("kept", {})))
        layout = None if ranks is None else parameters.layout
        storage = replace(Storage.from_description(header["storage"]), ranks=ranks, layout=layout)
        device = storage.device or parameters.device
        memory = {n: t.detach().to(device, copy=True) for n, t in memory.items()}
        rest = memory.pop(_REST, None)
        state = restored_state([memory], method, parameters.read(), storage, StoredSamples.restore)
        check_state(method, state, 1)
        generators = tensors[_RANDOM].cpu().clone()
        if len(generators) != _GENERATORS:
            raise ValueError(f"{len(generators)} generators instead of {_GENERATORS}")
        for one in generators:
            torch.Generator().set_state(one.clone())  # of a view it would read the wrong bytes
        tasks, notes = int(header["tasks"]), tuple(map(str, header["notes"]))
        steps = max(0, int(header["steps"]))
        if not 0 <= tasks <= _MOST_TASKS:
            raise ValueError(f"{tasks} tasks")
    except ConfigError:
        raise
    except (
        LookupError, AttributeError, TypeError, ValueError, RuntimeError, ArithmeticError
    ) as error:  # fmt: skip
        reason = first_line(error)
        if isinstance(error, KeyError):
            reason = f"{reason} is missing"
        raise ConfigError(f"the state is damaged or incomplete: {reason}") from error
    return Snapshot(state, storage, tasks, steps, notes, generators, kept, rest)


def method_name(tensors: Mapping[str, Tensor]) -> str | None:
    """The method that a state is of; None if it is damaged."""
    name = _header_of(tensors).get("method")
    return name if isinstance(name, str) else None


def _header_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    try:
        header: dict[str, Any] = json_value(tensors[_HEADER])
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


def _with_columns(memory: Mapping[str, Tensor], size: int) -> list[str]:
    """The tensors with a number for every protected weight, in their last dimension.

    Arguments:
        memory: from `state_tensors`.
        size: p.
    """

    def walk(node: Mapping[str, Any], path: str) -> Iterator[str]:
        prefix = f"{path}." if path else ""
        if node["kind"] == "directions":
            yield from (f"{prefix}directions", f"{prefix}start")
        elif node["kind"] == "tensor":
            name = path or "value"
            if memory[name].is_floating_point() and memory[name].shape[-1:] == (size,):
                yield name
        for name, part in node.get("parts", {}).items():
            yield from walk(part, prefix + name)

    structure = json_value(memory[STRUCTURE])
    return [name for name in walk(structure, "") if name in memory]


def _under(
    prefix: str, tensors: Mapping[str, Tensor], kinds: Mapping[str, object]
) -> dict[str, Tensor]:
    """The tensors under a prefix; a missing, additional or truncated one is rejected."""
    here = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    for name in [*kinds, *here]:
        found = _kind(here[name]) if name in here else "missing"
        if found != kinds.get(name):
            wanted = kinds.get(name, "no such tensor")
            raise ConfigError(f"the state is damaged: {name} is {found}, not {wanted}")
    return here


def _kept(tensors: Mapping[str, Tensor]) -> dict[int, StoredSamples]:
    """Task → its samples for the drift check, on the CPU."""
    by_task: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        task, _, key = name.partition(".")
        by_task.setdefault(int(task), {})[key] = tensor.detach().to("cpu", copy=True)
    return {task: StoredSamples.restore([by_task[task]]) for task in sorted(by_task)}


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


def _to_shards(
    tensors: dict[str, Tensor], header: dict[str, Any], parameters: Parameters
) -> dict[str, Tensor]:
    """The local columns as parts of one state, which the header then describes."""
    for name in header["columns"]:
        columns = tensors.pop(_MEMORY + name)  # (*, p), the p of this process
        header["memory"][name][0][-1] = sum(map(prod, parameters.shapes.values()))
        for (parameter, part), some, like in zip(
            (parameters.slices or {}).items(), parameters.columns, parameters.tensors, strict=True
        ):
            mine = columns[..., some].unflatten(-1, part.shape_here).contiguous()
            tensors[f"{_MEMORY}{name}{_OF}{parameter}"] = _sharded(mine, part, like)
    return tensors


def _from_shards(
    tensors: Mapping[str, Tensor], header: dict[str, Any], parameters: Parameters
) -> Mapping[str, Tensor]:
    """A state of one or many processes as that of this one, which the header then describes."""
    pieces = tuple(f"{_MEMORY}{name}{_OF}" for name in header["columns"])
    shapes = [(name, list(shape)) for name, shape in parameters.shapes.items()]
    fits = list(header["parameters"].items()) == shapes
    if not fits or not (parameters.slices or any(str(n).startswith(pieces) for n in tensors)):
        return tensors
    found = {name: t for name, t in tensors.items() if not str(name).startswith(pieces)}
    for name, described in header["memory"].items():
        if name in header["columns"]:
            found[_MEMORY + name] = torch.cat(_local_columns(tensors, name, parameters), -1)
            if parameters.slices:
                described[0][-1] = parameters.size
    return found


def _local_columns(
    tensors: Mapping[str, Tensor], name: str, parameters: Parameters
) -> list[Tensor]:
    """The local columns of each parameter, (*, size)."""
    shapes = list(parameters.shapes.values())
    if _MEMORY + name in tensors:
        parts = list(tensors[_MEMORY + name].split([prod(s) for s in shapes], dim=-1))
        parts = [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]
    else:
        parts = [tensors[f"{_MEMORY}{name}{_OF}{parameter}"] for parameter in parameters.names]
    found = []
    for (parameter, shape), part in zip(parameters.shapes.items(), parts, strict=True):
        leading = part.dim() - len(shape)
        if tuple(part.shape[leading:]) != shape:
            raise ConfigError(f"the state is damaged: {name} of {parameter} is {list(part.shape)}")
        mine = None if parameters.slices is None else parameters.slices[parameter]
        found.append(_local_part(part, leading, mine))
    return found


def _local_part(tensor: Tensor, leading: int, part: ParameterSlice | None) -> Tensor:
    if part is not None and is_sharded(tensor):
        mine = local(tensor)
        if tuple(mine.shape[leading:]) == part.shape_here:
            return mine.flatten(leading)
    everything = gathered(tensor)
    if part is not None:
        everything = everything.narrow(leading + part.dim, part.start, part.stop - part.start)
    return everything.flatten(leading)


def empty_shard(name: str, shape: torch.Size, dtype: torch.dtype, own: Parameters) -> Tensor:
    """A tensor that a stored one of this name and shape can be read into, part by part."""
    parameter = name.partition(_OF)[2]
    part = None if own.slices is None else own.slices.get(parameter)
    leading = len(shape) - (0 if part is None else len(part.shape))
    if part is None or tuple(shape[leading:]) != part.shape:
        return torch.zeros(shape, dtype=dtype, device=own.device)
    mine = torch.zeros(*shape[:leading], *part.shape_here, dtype=dtype, device=own.device)
    return _sharded(mine, part, own.tensors[own.names.index(parameter)])


def _sharded(mine: Tensor, part: ParameterSlice, like: Any) -> Tensor:
    """The local part (*, of a parameter) as one of a tensor (*, parameter)."""
    from torch.distributed.tensor import DTensor, Shard

    leading = mine.dim() - len(part.shape)
    shape = torch.Size((*mine.shape[:leading], *part.shape))
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    made: Tensor = DTensor.from_local(
        mine, like.device_mesh, [Shard(leading + part.dim)], shape=shape, stride=stride
    )
    return made


def storage_of(storage: str | Storage | None, max_rank: int | None) -> Storage:
    """The storage that a user names, with the most directions to store."""
    if not isinstance(storage, Storage):
        accepted = f"{', '.join(map(repr, STORAGES))} or a Storage"
        known = storage is None or (isinstance(storage, str) and storage in STORAGES)
        require(known, "storage", storage, accepted, STORAGES)
        storage = STORAGES[storage or "dense"]
    return storage if max_rank is None else replace(storage, max_rank=max_rank)


def chosen_storage(phi: TangentFeatures, method: Method[Any]) -> Storage:
    """Factored samples if they take fewer bytes than rows, judged by a few samples' features."""
    demand = method.demand()
    if demand is None:
        return DENSE
    needs = Footprint.of(phi, demand)
    return FACTORED if needs.bytes(FACTORED) < needs.bytes(DENSE) else DENSE


def require_rows_fit(
    method: Method[Any], storage: Storage, parameters: Parameters, size: int | None
) -> None:
    """Reject a task whose new rows alone fit no memory, before they are computed.

    Arguments:
        method: the method.
        storage: how it stores directions.
        parameters: the protected ones.
        size: samples of the task; None if unknown, so that nothing is certain.
    """
    demand = method.demand(size)
    if demand is None or size is None or storage.kind != "dense":
        return
    # As many as there are samples may be the most of a share of the variance, which needs fewer.
    if not demand.combined or demand.directions < demand.samples:
        row = parameters.size * parameters.dtype.itemsize
        require_memory("storing the task", demand.directions * row, parameters.device)


def voted_storage(mine: Storage | None, ranks: Ranks | None) -> Storage:
    """The choice of most processes, which may have samples of different lengths, or none."""
    votes = torch.tensor([mine == DENSE, mine == FACTORED]).long()
    dense, factored = (votes if ranks is None else ranks.sum(votes)).tolist()
    if dense + factored == 0:
        raise NoSamplesError("the loader has no samples")
    return FACTORED if factored > dense else DENSE


def as_asked(
    snapshot: Snapshot,
    empty: Callable[[Storage], Any],
    theta: Tensor,
    asked: Storage | None,
    max_rank: int | None,
    budget: int | None,
) -> Snapshot:
    """A loaded state of a method that keeps directions, in the storage that this guard asks for.

    Arguments:
        snapshot: the loaded state.
        empty: the state before the first step, in a storage.
        theta: the weights, (1, p).
        asked: the storage; None for the present one.
        max_rank: the most directions; None for all of them.
        budget: the most bytes; None for any number.
    """
    state: Any = snapshot.state
    made_rows = budget is not None and snapshot.storage.kind == "dense"
    if asked is not None and asked.kind == "factored" and made_rows:
        asked = None  # an earlier budget made factored samples rows
    now = snapshot.storage
    storage = replace(asked or now, ranks=now.ranks, layout=now.layout)
    storage = storage if max_rank is None else replace(storage, max_rank=max_rank)
    if not snapshot.tasks:
        return replace(snapshot, state=empty(storage), storage=storage)
    if storage != state.storage:
        state = state.moved_to(storage, theta)
    note = None
    if budget is not None:
        state, note = state.within(budget)
    notes = snapshot.notes if note is None else (*snapshot.notes, note)
    return replace(snapshot, state=state, storage=state.storage, notes=notes)
