"""What Gram matrices give against what features give."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgetless import tangent_features
from forgetless.linalg import orthonormalize
from forgetless.theory import (
    LinearTask,
    SampleProjection,
    coordinates,
    decompose,
    factors,
    gram_grid,
    learn,
    operator_overlap,
    overlap,
    overlap_spectrum,
    unprotected_share,
)
from tests.theory.problems import METHODS, dense_projection, network_tasks, pairs, random_tasks


def grid_of(tasks):
    return [[a.features @ b.features.T for b in tasks] for a in tasks]


def test_the_operator_form_equals_the_dense_one():
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    ).double()
    pair = [
        tangent_features(network, torch.randn(n, 6).double(), torch.randint(3, (n,)))
        for n in (9, 5)
    ]
    p = pair[0].shape[1]
    basis = orthonormalize(torch.randn(4, p).double())
    dense = [factors(phi.dense()) for phi in pair]
    for rows in (None, basis, torch.cat([basis, torch.zeros(2, p).double()])):
        expected = overlap_spectrum(overlap(*dense, rows))
        found = overlap_spectrum(operator_overlap(*pair, rows))
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
        share = unprotected_share(pair[0], rows)
        left = pair[0].dense() if rows is None else pair[0].dense() @ dense_projection(rows)
        whole = pair[0].dense().square().sum()
        assert share == pytest.approx(float(left.square().sum() / whole))
    matrix = dense_projection(basis)
    by_function = operator_overlap(*pair, lambda rows: rows @ matrix)
    torch.testing.assert_close(by_function, operator_overlap(*pair, basis), atol=1e-9, rtol=0)
    share = unprotected_share(pair[0], lambda rows: rows @ matrix)
    assert share == pytest.approx(unprotected_share(pair[0], basis))
    assert share < 1


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_contributions_from_coordinates_are_those_from_features(method):
    tasks = network_tasks("cnn")
    narrow = [
        LinearTask(z, t.targets, t.outputs)
        for z, t in zip(coordinates(grid_of(tasks)), tasks, strict=True)
    ]
    a, b = learn(tasks, method), learn(narrow, method)
    for s, t in pairs(4):
        for x, y in zip(decompose(a, s, t).contributions, decompose(b, s, t).contributions):
            torch.testing.assert_close(x.drift, y.drift, rtol=1e-8, atol=1e-9)
            torch.testing.assert_close(
                overlap_spectrum(x.overlap), overlap_spectrum(y.overlap), rtol=1e-8, atol=1e-10
            )


@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    p=st.integers(1, 9),
    whole=st.booleans(),
)
def test_coordinates_are_an_isometry(seed, sizes, p, whole):
    tasks = random_tasks(seed, sizes, p, whole=whole)
    grid = grid_of(tasks)
    z = coordinates(grid)
    assert z[0].shape[1] <= min(p, sum(sizes))
    for s in range(len(sizes)):
        for t in range(len(sizes)):
            torch.testing.assert_close(z[s] @ z[t].T, grid[s][t], rtol=1e-9, atol=1e-9)


def test_duplicates_do_not_become_directions_in_coordinates():
    tasks = random_tasks(2, (4, 5), 30)
    twice = [
        LinearTask(*(torch.cat([t, t]) for t in (task.features, task.targets, task.outputs)))
        for task in tasks
    ]
    narrow = [
        LinearTask(z, t.targets, t.outputs)
        for z, t in zip(coordinates(grid_of(twice)), twice, strict=True)
    ]
    assert narrow[0].features.shape[1] == 9
    a, b = learn(twice, SampleProjection(memory=7)), learn(narrow, SampleProjection(memory=7))
    assert len(a.bases[1]) == len(b.bases[1])
    torch.testing.assert_close(a.drift(0, 1), b.drift(0, 1), rtol=1e-8, atol=1e-9)


class Dense:
    """Features that know their inner products, written out."""

    def __init__(self, rows):
        self.rows = rows

    def gram(self):
        return self.rows @ self.rows.T

    def cross_gram(self, other):
        return self.rows @ other.rows.T


def test_the_grid_of_features():
    tasks = random_tasks(0, (2, 3, 4), 5)
    grid = gram_grid([Dense(t.features) for t in tasks])
    for row, expected in zip(grid, grid_of(tasks), strict=True):
        for block, other in zip(row, expected, strict=True):
            torch.testing.assert_close(block, other)
