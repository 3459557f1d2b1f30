"""A number of bytes that remembered directions must fit in, and what is done to fit them."""

from dataclasses import replace
from typing import Any

import torch

from forgetless.guard.report import in_words
from forgetless.methods import PCAOGD, Method
from forgetless.subspace import DENSE, FACTORED, DenseSubspace, FactoredSubspace, Storage, Subspace
from forgetless.tangent import TangentFeatures, held, held_bytes


def chosen_storage(phi: TangentFeatures, method: Method[Any]) -> Storage:
    """Factored samples where they take less than rows, by the features of a few samples."""
    factored = held_bytes(held(phi)) / len(phi)
    row = phi.shape[1] * phi.like.element_size()
    if isinstance(method, PCAOGD):
        # All samples that were looked at are kept, and each direction's weights of them.
        count = method.components if isinstance(method.components, int) else method.samples
        cheaper = method.samples * (factored + 8 * count) < count * row
    else:
        cheaper = factored < row
    return FACTORED if cheaper else DENSE


def within(state: Subspace, budget: int) -> tuple[Subspace, str | None]:
    """The directions in no more than `budget` bytes, and what had to be given up, in words.

    Dense rows are first rounded to bfloat16, then the directions that explain least are left out;
    of factored samples those are left out that the others explain best.
    """
    needed = state.nbytes
    if needed <= budget:
        return state, None
    before, asked = state.kept_share(), in_words(needed)
    if isinstance(state, DenseSubspace):
        storage = replace(state.storage, dtype=torch.bfloat16)
        rounded = state.stored(storage)
        if rounded.nbytes <= budget:
            return rounded, (
                f"rows rounded to bfloat16: {asked} asked for, {in_words(budget)} given; "
                "about 1e-3 of a protected component stays in a step"
            )
        row = rounded.rows[:, :1].nbytes + 8 * state.rank
        limit = max(1, budget // row)
        # The next task is not held to this limit: the budget decides again.
        cut = state.stored(replace(storage, max_rank=limit))
        fewer: Subspace = replace(cut, storage=storage)
        rows = f"{limit} of {state.rank} directions kept, rounded to bfloat16"
    elif isinstance(state, FactoredSubspace):
        limit = max(1, state.rank * budget // needed)
        fewer = state.limited(limit)
        rows = f"{limit} of {state.rank} samples kept"
    else:
        return state, None
    return fewer, (
        f"{rows}: {asked} asked for, {in_words(budget)} given; {before:.1%} of the variance was "
        f"explained, {fewer.kept_share():.1%} is now"
    )
