"""A replay: the weights, the memory and the features of a finished run."""

import pytest
import torch

from forgetless.paper.benchmarks import Run
from forgetless.subspace import FactoredSubspace
from forgetless.subspace.factored import Atoms
from forgetless.training.fit import fit
from forgetless.training.models import build_model


@pytest.mark.parametrize("method", ["ogd", "pca-ogd"])
def test_a_replay_remembers_what_the_run_remembered(tiny, workshop, method):
    run = Run(tiny.config("rotated", method), weights=True)
    workshop.train([run])
    scenario = workshop.scenario(run.config)
    trace = fit(
        scenario,
        run.config.build_method(),
        lambda: build_model(run.config, scenario.input_shape, scenario.n_outputs),
        seeds=run.config.seed_list(),
        training=run.config,
        device="cpu",
    )
    replay = workshop.replay(run)
    for task in range(2):
        replay.at(task)
        replay.remember(task)
    for seed, rows in zip(trace.seeds, replay.directions(), strict=True):
        kept = trace.state(seed)["directions"]
        # The same subspace: each projects the other onto itself.
        torch.testing.assert_close(kept @ rows.T @ rows, kept, atol=1e-4, rtol=0)
        assert len(kept) == len(rows)


def test_before_training_a_replay_has_the_weights_that_training_starts_from(tiny, workshop):
    run = Run(tiny.config("rotated", "sgd", lr=1e-30), weights=True)
    workshop.train([run])
    replay = workshop.replay(run)
    initial = replay.learner.network.theta.clone()
    replay.at(0)
    torch.testing.assert_close(replay.learner.network.theta, initial, atol=0, rtol=0)


def test_rows_of_factored_samples_are_made_for_one_seed_at_a_time(tiny, workshop, monkeypatch):
    run = Run(tiny.config("rotated", "ogd", storage="factored"), weights=True)
    workshop.train([run])
    replay = workshop.replay(run)
    replay.at(0)
    replay.remember(0)
    dense = replay.learner.state.dense().rows
    monkeypatch.setattr(FactoredSubspace, "dense", None)  # calling it would fail
    made = []
    basis = Atoms.basis
    monkeypatch.setattr(Atoms, "basis", lambda self: made.append(1) or basis(self))
    for count, (rows, same) in enumerate(zip(replay.directions(), dense, strict=True), 1):
        assert len(made) == count
        torch.testing.assert_close(rows, same[: len(rows)])
