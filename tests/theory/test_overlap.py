"""The overlap matrix by SVD of features and by Gram matrices, and its angles by SciPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import subspace_angles

from forgetless.theory import (
    ComponentProjection,
    GradientProjection,
    LinearTask,
    NoProjection,
    SampleProjection,
    component_memory,
    coordinates,
    decompose,
    factors,
    gradient_memory,
    gram_grid,
    gram_overlap,
    learn,
    learned_overlap,
    overlap,
    overlap_spectrum,
    principal_angles,
    remembered,
    sample_memory,
)
from tests.theory.problems import METHODS, NETWORKS, network_tasks, pairs, random_tasks


def grid_of(tasks):
    return [[a.features @ b.features.T for b in tasks] for a in tasks]


@pytest.mark.parametrize("kind", NETWORKS)
def test_angles_are_scipys(kind):
    a, b = (t.features for t in network_tasks(kind)[:2])
    angles = principal_angles(factors(a), factors(b))
    expected = np.sort(subspace_angles(a.T.numpy(), b.T.numpy()))
    np.testing.assert_allclose(angles.numpy(), expected, atol=1e-12)
    spectrum = overlap_spectrum(overlap(factors(a), factors(b)))
    np.testing.assert_allclose(spectrum.numpy(), np.cos(expected), atol=1e-12)


def test_tiny_angles_keep_their_digits():
    a = torch.eye(4, dtype=torch.float64)[:2]
    b = a.clone()
    b[0, 3] = 1e-9
    np.testing.assert_allclose(principal_angles(factors(a), factors(b)), [0, 1e-9], rtol=1e-6)
    assert principal_angles(factors(b), factors(a[1:])).tolist() == pytest.approx([0.0])


@given(seed=st.integers(0, 10_000), n=st.integers(1, 5), m=st.integers(1, 5), p=st.integers(1, 8))
def test_overlap_is_a_contraction(seed, n, m, p):
    tasks = random_tasks(seed, (n, m, n), p)
    for method in (
        NoProjection(),
        SampleProjection(1),
        ComponentProjection(1),
        GradientProjection(1),
    ):
        solved = learn(tasks, method, weight_decay=0.1)
        spectrum = overlap_spectrum(learned_overlap(solved, 0, 2))
        assert bool((spectrum <= 1 + 1e-12).all())


@pytest.mark.parametrize("kind", NETWORKS)
def test_overlap_by_gram_matrices_is_that_by_svd(kind):
    tasks = network_tasks(kind)
    grid, sizes = grid_of(tasks), [len(t.targets) for t in tasks]
    for s, t in pairs(4):
        ogd = SampleProjection(memory=3, seed=1)
        pca = ComponentProjection(components=2)
        gem = GradientProjection(memory=4, seed=2)
        kept3 = [remembered(3, 1, j, sizes[j]) for j in range(t)]
        kept4 = [remembered(4, 2, j, sizes[j]) for j in range(t)]
        for_gem = learn(tasks, gem, weight_decay=0.5)
        left = [
            for_gem.predict(task.features, task.outputs)[t] - task.targets for task in tasks[:t]
        ]
        memories = {
            NoProjection(): None,
            ogd: sample_memory(grid, kept3),
            pca: component_memory(grid, t, 2),
            gem: gradient_memory(grid, kept4, left),
        }
        for method, memory in memories.items():
            solved = learn(tasks, method, weight_decay=0.5)
            by_svd = learned_overlap(solved, s, t)
            by_gram = gram_overlap(grid, s, t, memory)
            assert by_gram.shape == by_svd.shape
            torch.testing.assert_close(
                overlap_spectrum(by_gram), overlap_spectrum(by_svd), rtol=1e-8, atol=1e-10
            )
            torch.testing.assert_close(by_gram.abs(), by_svd.abs(), rtol=1e-7, atol=1e-9)


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
