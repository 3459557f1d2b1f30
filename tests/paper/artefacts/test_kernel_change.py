"""The change of the kernel, and the share that stored directions capture."""

import numpy as np
import pytest

from forgetless.paper.artefacts import (
    kernel_change,
)
from forgetless.paper.benchmarks import Run
from forgetless.paper.replay import Replay


def test_what_is_captured_is_the_share_of_the_features_in_what_was_stored(tiny, workshop):
    """Against least squares on the dense features; only the weights of task 1 were stored."""
    run = Run(tiny.config("rotated", "pca-ogd"), weights=True)
    workshop.train([run])
    found = np.array(kernel_change.probe(workshop, run)["captured"])
    replay = workshop.replay(run)
    samples = replay.samples(0, tiny.overlap_samples, "samples of the kernel's change")
    replay.at(0)
    replay.remember(0)
    stored = [rows.double().numpy() for rows in replay.directions()]
    for task in range(run.config.tasks):
        replay.at(task)
        for seed, phi in enumerate(replay.features(samples)):
            dense = phi.dense().double().numpy()
            inside = stored[seed].T @ np.linalg.lstsq(stored[seed].T, dense.T, rcond=None)[0]
            share = np.square(inside).sum() / np.square(dense).sum()
            assert found[seed, task] == pytest.approx(share, rel=1e-4)


def test_a_seed_of_which_nothing_was_stored_is_not_passed_over(tiny, workshop, monkeypatch):
    run = Run(tiny.config("rotated", "pca-ogd"), weights=True)
    workshop.train([run])
    monkeypatch.setattr(Replay, "directions", lambda self: iter([None, None]))
    with pytest.raises(ValueError, match="shorter"):
        kernel_change.probe(workshop, run)
