"""Explained variance against scikit-learn, and the change of a kernel."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from forgetless.theory import (
    explained_at,
    explained_variance,
    kernel_alignment,
    kernel_change,
)
from tests.theory.problems import network_tasks, random_tasks


def test_centred_explained_variance_is_that_of_pca():
    phi = network_tasks("mlp", sizes=(12,))[0].features
    curve = explained_variance(phi @ phi.T, centred=True)
    expected = PCA().fit(phi.numpy()).explained_variance_ratio_.cumsum()
    np.testing.assert_allclose(curve.numpy(), expected, atol=1e-12)


def test_uncentred_explained_variance_is_that_of_the_singular_values():
    phi = network_tasks("mlp", sizes=(12,))[0].features
    energy = np.square(np.linalg.svd(phi.numpy(), compute_uv=False))
    shares = explained_at(phi @ phi.T, [1, 5, 12])
    np.testing.assert_allclose(shares, (energy.cumsum() / energy.sum())[[0, 4, 11]], atol=1e-12)
    assert float(shares[-1]) == pytest.approx(1)


def test_a_kernel_that_only_grew_is_aligned():
    phi = random_tasks(0, (6,), 4)[0].features
    k = phi @ phi.T
    assert kernel_change(k, 3 * k) == pytest.approx(2)
    assert kernel_alignment(k, 3 * k) == pytest.approx(1)
    assert kernel_change(k, k) == 0
    a, b = torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert kernel_alignment(a, b) == 0
    assert kernel_change(a, b) == pytest.approx(2**0.5)
