"""The overlap matrix of SVDs, and its angles by SciPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import subspace_angles

from forgetless.theory import (
    ComponentProjection,
    GradientProjection,
    NoProjection,
    SampleProjection,
    factors,
    learn,
    overlap,
    overlap_spectrum,
    principal_angles,
)
from tests.theory.problems import NETWORKS, network_tasks, random_tasks


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
        spectrum = overlap_spectrum(solved.overlap(0, 2))
        assert bool((spectrum <= 1 + 1e-12).all())
