"""The memory report of each kind of memory."""

from forgetless.guard.parameters import Parameters
from forgetless.guard.report import MemoryReport, TaskMemory
from forgetless.methods import State
from forgetless.subspace import DenseSubspace, FactoredSubspace, Storage, Subspace
from forgetless.tangent import bytes_by_parameter


def memory_report(
    state: State, storage: Storage, tasks: int, parameters: Parameters, notes: tuple[str, ...]
) -> MemoryReport:
    """What a state keeps, task by task and layer by layer."""
    if not isinstance(state, Subspace):
        return _of_samples(state, tasks, notes)
    total, rank = state.nbytes, state.rank
    ranks, shares = state.record.ranks[0].tolist(), state.record.shares[0].tolist()
    # Directions that were merged or left out since are missing from every task alike.
    each = total / max(1, sum(ranks))
    by_task = tuple(
        TaskMemory(count, round(count * each), share)
        for count, share in zip(ranks, shares, strict=True)
    )
    if isinstance(state, DenseSubspace):
        item = state.rows.element_size() * rank
        sizes = [columns.stop - columns.start for columns in parameters.columns]
        layers = {n: size * item for n, size in zip(parameters.names, sizes, strict=True)}
    elif isinstance(state, FactoredSubspace) and state.atoms:
        layers = bytes_by_parameter(state.atoms[0].phi)
    else:
        layers = {}
    share = state.kept_share() if tasks else None
    return MemoryReport(str(storage), total, rank, share, by_task, layers, notes)


def _of_samples(state: State, tasks: int, notes: tuple[str, ...]) -> MemoryReport:
    """Of methods that keep samples or one number a weight."""
    tensors = state.tensors(0)
    total = sum(t.nbytes for t in tensors.values())
    kept = ", ".join(sorted({name.rpartition(":")[2].rpartition(".")[2] for name in tensors}))
    by_task = tuple(TaskMemory(0, total // tasks, None) for _ in range(tasks))
    return MemoryReport(kept or "nothing", total, 0, None, by_task, {}, notes)
