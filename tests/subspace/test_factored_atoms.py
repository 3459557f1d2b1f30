"""Which samples stay when there is room for fewer."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from forgetless.subspace.factored import best_rows

from ..tangent.reference import random


@given(st.integers(0, 10**6))
def test_samples_are_chosen_greedily_by_what_they_add(seed):
    vectors, root = random(7, 5, seed=seed), random(5, 5, seed=seed + 1)
    moments = root @ root.T

    def explained(chosen) -> float:
        basis = torch.linalg.qr(vectors[list(chosen)].T)[0]
        return float((basis.T @ moments @ basis).trace())

    chosen: list[int] = []
    for _ in range(3):
        gains = {i: explained([*chosen, i]) for i in range(7) if i not in chosen}
        chosen.append(max(gains, key=gains.__getitem__))
        assert best_rows(vectors, moments, len(chosen)).tolist() == sorted(chosen)
    best = max(explained(c) for c in itertools.combinations(range(7), 3))
    assert explained(chosen) >= 0.6 * best


def test_more_samples_than_dimensions_are_asked_for():
    vectors = random(6, 3)
    assert len(best_rows(vectors, torch.eye(3).double(), 5)) == 3
