"""Projections where only some of the columns can move, against an SVD in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgetless.subspace import DENSE, FACTORED, DenseSubspace, FactoredSubspace, Record, Storage
from forgetless.tangent import tangent_features

from ..tangent.reference import random


def restricted(rows: torch.Tensor, columns: list[slice]) -> DenseSubspace:
    k = len(rows)
    moments = torch.zeros(1, k, k, dtype=torch.float64)
    return DenseSubspace(rows.unsqueeze(0), moments, Record.empty(1)).restricted(columns)


def nearest(g: torch.Tensor, rows: torch.Tensor, movable: torch.Tensor) -> torch.Tensor:
    _, values, vectors = torch.linalg.svd(rows.double() * movable, full_matrices=False)
    basis = vectors[values > 1e-10]
    inside = g.double() * movable
    return inside - (inside @ basis.T) @ basis


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 11), st.integers(0, 11))
def test_the_nearest_movable_vector(seed, k, first, second):
    rows = torch.linalg.qr(random(12, k, seed=seed))[0].T
    columns = [slice(0, first), slice(max(first, second), 12)]
    movable = torch.zeros(12)
    for some in columns:
        movable[some] = 1
    g = random(1, 12, seed=seed + 1)
    found = restricted(rows, columns).project_out(g)
    torch.testing.assert_close(found, nearest(g, rows, movable), rtol=0, atol=1e-6)
    assert float((rows @ found[0]).norm()) < 1e-9


@pytest.mark.parametrize("tiny", [0.1, 0.03, 0.01])
def test_directions_of_which_little_can_move_in_float32(tiny):
    """Half of the directions have nearly the same in what can move as the other half."""
    vectors = random(30, 400)
    vectors[15:, 200:] = vectors[:15, 200:] + tiny * random(15, 200, seed=1)
    vectors[:15, 200:] *= tiny
    rows = torch.linalg.qr(vectors.T)[0].T.float()
    found = restricted(rows, [slice(200, 400)]).project_out(random(1, 400, seed=2).float())
    assert float((rows.double() @ found[0].double()).norm() / found.norm()) < 3e-7


@pytest.mark.parametrize("storage", [DENSE, FACTORED, Storage("factored", max_rank=4)])
def test_what_is_added_to_a_restricted_subspace_is_restricted(storage):
    """As if it had been restricted afterwards; also while nothing is remembered."""
    kind = FactoredSubspace if storage.kind == "factored" else DenseSubspace
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1)).double()
    phi = tangent_features(model, random(3, 5))
    more = tangent_features(model, random(3, 5, seed=1))
    columns = [its for name, its in phi.columns() if name.startswith("0.")]
    empty = kind.empty(torch.zeros(1, phi.shape[1]).double(), storage)
    g = random(1, phi.shape[1], seed=2)
    frozen = torch.ones(phi.shape[1], dtype=torch.bool)
    for some in columns:
        frozen[some] = False
    assert empty.restricted(columns).project_out(g)[0, frozen].abs().max() == 0
    first = empty.restricted(columns).add_samples([phi]).add_samples([more])
    last = empty.add_samples([phi]).add_samples([more]).restricted(columns)
    expected = last.project_out(g)
    torch.testing.assert_close(first.project_out(g), expected, rtol=0, atol=1e-12)
    assert expected[0, frozen].abs().max() == 0
