"""Storage of directions in a number of bytes: which to choose, and how to fit a loaded state."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forgetless.guard.parameters import Parameters
from forgetless.guard.state import Snapshot
from forgetless.methods import Method
from forgetless.subspace import DENSE, FACTORED, Storage
from forgetless.subspace.footprint import Footprint
from forgetless.support.collectives import Ranks
from forgetless.support.errors import NoSamplesError
from forgetless.support.memory import require_memory
from forgetless.tangent import TangentFeatures


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
