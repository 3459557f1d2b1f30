"""A number of bytes that remembered directions must fit in, and what is done to fit them."""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from typing import Any

import torch

from forgetless.guard.state import Snapshot
from forgetless.methods import Method, State
from forgetless.methods.orthogonal import Orthogonal
from forgetless.subspace import DENSE, FACTORED, DenseSubspace, FactoredSubspace, Storage, Subspace
from forgetless.subspace.footprint import Footprint
from forgetless.support.collectives import Ranks
from forgetless.support.errors import ConfigError, NoSamplesError
from forgetless.support.sizes import in_words
from forgetless.tangent import TangentFeatures


def chosen_storage(phi: TangentFeatures, method: Method[Any]) -> Storage:
    """Factored samples where they take less than rows, by the features of a few samples."""
    if not isinstance(method, Orthogonal):
        return DENSE
    needs = Footprint.of(phi, method.demand())
    return FACTORED if needs.bytes(FACTORED) < needs.bytes(DENSE) else DENSE


def voted_storage(mine: Storage | None, ranks: Ranks | None) -> Storage:
    """What most processes chose: they have samples of different lengths, or none."""
    votes = torch.tensor([mine == DENSE, mine == FACTORED]).long()
    dense, factored = (votes if ranks is None else ranks.sum(votes)).tolist()
    if dense + factored == 0:
        raise NoSamplesError("the loader has no samples")
    return FACTORED if factored > dense else DENSE


def as_asked(
    snapshot: Snapshot,
    empty: Callable[[Storage], State],
    asked: Storage | None,
    max_rank: int | None,
    budget: int | None,
) -> Snapshot:
    """A state from elsewhere, its directions kept as this guard is to keep its own.

    Arguments:
        empty: the state before any task.
        asked: how; None for as they are.
        max_rank: the most directions; None for as many as there.
        budget: the most bytes; None for any number.
    """
    state, notes = snapshot.state, snapshot.notes
    if not isinstance(state, Subspace):
        return snapshot
    made_rows = budget is not None and isinstance(state, DenseSubspace)
    if asked is not None and asked.kind == "factored" and made_rows:
        asked = None  # by a budget, as `within` does
    storage = replace(asked or snapshot.storage, ranks=snapshot.storage.ranks)
    storage = storage if max_rank is None else replace(storage, max_rank=max_rank)
    nothing = empty(storage)
    if not snapshot.tasks:
        return replace(snapshot, state=nothing, storage=storage)
    if storage != state.storage:
        state = _kept_as(state, storage, nothing)
    if budget is not None:
        state, note = within(state, budget)
        notes = notes if note is None else (*notes, note)
    return replace(snapshot, state=state, storage=state.storage, notes=notes)


def _kept_as(state: Subspace, storage: Storage, nothing: State) -> Subspace:
    """The same directions in another storage.

    Arguments:
        nothing: the state before any task, whose rows are as precise and where they are to be.
    """
    if isinstance(state, FactoredSubspace) and storage.kind == "factored":
        kept = replace(state, storage=storage)
        return kept if storage.max_rank is None else kept.limited(storage.max_rank)
    if storage.kind == "factored":
        raise ConfigError("the state has dense rows, which cannot become factored samples")
    if isinstance(state, FactoredSubspace) and state.atoms:
        state = state.dense()
    if not isinstance(state, DenseSubspace) or not isinstance(nothing, DenseSubspace):
        return state
    # `stored` changes only what the storage names.
    dtype = nothing.rows.dtype if storage.dtype is None else None
    device = nothing.rows.device if storage.device is None else None
    rows = state.rows.to(device or state.rows.device, dtype or state.rows.dtype)
    return replace(state, rows=rows).stored(storage)


def within(state: Subspace, budget: int) -> tuple[Subspace, str | None]:
    """The directions in no more than `budget` bytes, and what had to be given up, in words.

    Dense rows are first rounded to bfloat16, then the directions that explain least are left out;
    of factored samples those are left out that add least to the others. Principal directions of
    factored samples become rows, for with fewer of them as many samples would stay.
    """
    needed = state.nbytes
    if needed <= budget:
        return state, None
    before, rank = state.kept_share(), state.rank
    how: list[str] = []
    if isinstance(state, FactoredSubspace) and state.has_combinations:
        state = state.dense()
        how.append("factored samples made rows")
    if isinstance(state, DenseSubspace) and state.nbytes > budget:
        state = state.stored(replace(state.storage, dtype=torch.bfloat16))
        how.append("rows rounded to bfloat16, which leaves about 1e-3 of a protected component")
    if state.nbytes > budget:
        state = _fewer(state, budget)
        how.append(f"{state.rank} of {rank} directions kept")
    if state.nbytes > budget:
        raise ConfigError(
            f"budget must be enough for at least one direction, {in_words(state.nbytes)} for this "
            f"model, not {in_words(budget)}"
        )
    return state, (
        f"{', '.join(how)}: {in_words(needed)} asked for, {in_words(budget)} given; {before:.1%} "
        f"of the variance was explained, {state.kept_share():.1%} is now"
    )


def _fewer(state: Subspace, budget: int) -> Subspace:
    """As many directions as fit, at least one; the next task is not held to their number."""
    rank = state.rank
    # Bytes are a K + q K², with q for the small matrices (K, K) of float64.
    q = 8 if isinstance(state, DenseSubspace) else 24
    a = state.nbytes / rank - q * rank
    limit = min(rank - 1, int((sqrt(a * a + 4 * q * budget) - a) / (2 * q)))
    while True:
        limit = max(1, limit)
        if isinstance(state, DenseSubspace):
            cut = state.stored(replace(state.storage, max_rank=limit))
            fewer: Subspace = replace(cut, storage=state.storage)
        elif isinstance(state, FactoredSubspace):
            fewer = state.limited(limit)
        else:
            return state
        if fewer.nbytes <= budget or limit == 1:
            return fewer
        # Samples take more or less of it, such as sequences of different lengths.
        limit = min(limit - 1, int(limit * budget / fewer.nbytes))
