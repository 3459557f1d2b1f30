"""Runs: what tells them apart, and that none is trained twice."""

from dataclasses import replace

import pytest
import torch

from forgetless.fit import fit
from forgetless.methods import build_method
from forgetless.models import build_model
from forgetless.paper.numbers import accuracies
from forgetless.paper.scale import FULL, SMALL
from forgetless.paper.work import Run, Workshop


@pytest.fixture
def tiny():
    """Rotated digits, so small that a run takes no time."""
    settings = {"train_per_class": 8, "epochs": 1, "samples": 40, "tasks": 2, "hidden": 8}
    benchmark = replace(SMALL.benchmarks["rotated"], settings=settings)
    return replace(SMALL, benchmarks={"rotated": benchmark}, memory=4)


@pytest.fixture
def workshop(tiny, tmp_path):
    return Workshop(tiny, tmp_path, None, "cpu", {})


def test_what_does_not_change_the_result_does_not_change_the_key():
    sgd = FULL.config("rotated", "sgd")
    assert Run(sgd).key == Run(FULL.config("rotated", "sgd", "corrected"), weights=True).key
    assert Run(sgd).key == Run(replace(sgd, device="cuda", seeds_together=1)).key
    # Without heads A-GEM has only one way.
    released, corrected = (FULL.config("rotated", "a-gem", p) for p in ("released", "corrected"))
    assert Run(released).key == Run(corrected).key


@pytest.mark.parametrize(
    ("benchmark", "method", "change"),
    [
        ("rotated", "sgd", {"seeds": "3"}),
        ("rotated", "sgd", {"lr": 0.1}),
        ("rotated", "pca-ogd", {"memory": 25}),
        ("rotated", "pca-ogd", {"centred": False}),
        ("rotated", "ogd", {"storage": "bfloat16"}),
        ("rotated", "sgd", {"validation_per_class": 5}),
        ("split", "a-gem", {"agem_heads": "own"}),
        ("cifar", "sgd", {"freeze": ""}),
    ],
)
def test_what_changes_the_result_changes_the_key(benchmark, method, change):
    config = FULL.config(benchmark, method)
    assert Run(config).key != Run(replace(config, **change)).key


def test_a_run_is_there_only_when_it_is_complete_and_has_what_is_needed(tiny, workshop):
    run = Run(tiny.config("rotated", "sgd"))
    assert not workshop.is_trained(run)
    workshop.train([run])
    assert workshop.is_trained(run)
    assert not workshop.is_trained(replace(run, weights=True))
    workshop.train([replace(run, weights=True)])
    assert workshop.is_trained(replace(run, weights=True))
    record = workshop.runs / run.key / "trace.json"
    record.write_text(record.read_text().replace('"complete"', '"interrupted"'))
    assert not workshop.is_trained(run)


def test_a_run_that_diverges_says_so_and_is_not_tried_again(tiny, workshop):
    run = Run(tiny.config("rotated", "ewc", ewc_strength=1e30, tasks=3, epochs=3))
    workshop.train([run])
    assert workshop.trace(run).status == "failed"
    assert workshop.is_trained(run)
    assert accuracies(workshop.trace(run)) == {"diverged": True}


def test_a_run_that_failed_for_another_reason_is_trained_again(tiny, workshop):
    run = Run(tiny.config("rotated", "sgd"))
    workshop.train([run])
    record = workshop.runs / run.key / "trace.json"
    record.write_text(record.read_text().replace('"complete"', '"failed"'))
    assert not workshop.is_trained(run)


@pytest.mark.parametrize("method", ["ogd", "pca-ogd"])
def test_a_replay_remembers_what_the_run_remembered(tiny, workshop, method):
    run = Run(tiny.config("rotated", method), weights=True)
    workshop.train([run])
    scenario = workshop.scenario(run.config)
    trace = fit(
        scenario,
        build_method(method, run.config),
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
        kept = trace.memory(seed)["directions"]
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
