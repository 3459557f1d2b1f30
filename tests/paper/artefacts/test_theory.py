"""The checks of the theory."""

import numpy as np
import pytest
import torch

from forgetless.paper.artefacts import (
    theory,
)


def test_small_networks_are_drawn_the_same_and_leave_the_global_generator_alone():
    found = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            found.append(theory.one_sample())
            assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]


def test_the_printed_algorithm_reverses_what_pca_found():
    """Against NumPy, from the printed sums over one stored vector after another."""
    phi = theory.some_tasks(0)[0].features.numpy()
    stored = []
    for gradient in phi:
        stored.append(gradient - sum(v * (v @ gradient) / (v @ v) for v in stored))
    stored += list(np.linalg.svd(phi)[2][: theory.MEMORY])
    taken = np.eye(phi.shape[1]) - sum(np.outer(v, v) / (v @ v) for v in stored)
    found = theory._as_printed()
    assert found["least"] == pytest.approx(np.linalg.eigvalsh(taken)[0], abs=1e-9)
    assert found["least"] == pytest.approx(-1, abs=1e-9)
    assert (found["stored"], found["meant"]) == (len(stored), theory.MEMORY)
