"""Runs: what tells them apart, and that none is trained twice."""

import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forgetless.paper.artefact import Artefact, all_or_nothing
from forgetless.paper.artefacts import (
    kernel_change,
    methods_summary,
    overlap_later,
    protocols,
    strength,
    theory_gem_nt,
)
from forgetless.paper.build import Plan, build
from forgetless.paper.numbers import accuracies
from forgetless.paper.replay import Replay
from forgetless.paper.run import Run
from forgetless.paper.scale import FULL, METHODS, SMALL
from forgetless.paper.store import load_results
from forgetless.paper.work import Look, Workshop
from forgetless.subspace import FactoredSubspace, Subspace
from forgetless.subspace.atoms import Atoms
from forgetless.trace import load_trace
from forgetless.trace.cache import write_beside
from forgetless.training.fit import fit
from forgetless.training.models import build_model

TABLE1 = Path(__file__).parents[2] / "results" / "table1"


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
        ("cifar", "ogd", {"unprotected": "convolutions"}),
    ],
)
def test_what_changes_the_result_changes_the_key(benchmark, method, change):
    config = FULL.config(benchmark, method)
    assert Run(config).key != Run(FULL.config(benchmark, method, **change)).key


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


def test_a_run_that_lost_some_of_its_weights_is_trained_again(tiny, workshop):
    run = Run(tiny.config("rotated", "sgd"), weights=True)
    workshop.train([run])
    (workshop.runs / run.key / "seed-0/task-01.safetensors").unlink()
    assert not workshop.is_trained(run)
    assert workshop.is_trained(replace(run, weights=False))
    workshop.train([run])
    assert workshop.is_trained(run)


@pytest.mark.parametrize("text", ["", "{}", "nonsense"])
def test_a_run_whose_trace_is_damaged_is_trained_again(tiny, workshop, text):
    run = Run(tiny.config("rotated", "sgd"))
    workshop.train([run])
    found = workshop.trace(run).accuracy
    (workshop.runs / run.key / "trace.json").write_text(text)
    assert not workshop.is_trained(run)
    workshop.train([run])
    np.testing.assert_array_equal(workshop.trace(run).accuracy, found)


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


def test_what_is_captured_is_the_share_of_the_features_in_what_was_stored(tiny, workshop):
    """Against least squares on the dense features; only the weights of task 1 were stored."""
    run = Run(tiny.config("rotated", "pca-ogd"), weights=True)
    workshop.train([run])
    found = np.array(kernel_change.find(workshop, run)["captured"])
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
        kernel_change.find(workshop, run)


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


def test_small_networks_are_drawn_the_same_and_leave_the_global_generator_alone():
    found = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            found.append(theory_gem_nt.one_sample())
            assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]


def remove_weights(workshop, run):
    for folder in (workshop.runs / run.key).glob("seed-*"):
        shutil.rmtree(folder)


def test_what_was_found_in_weights_outlives_them(tiny, workshop):
    run = Run(tiny.config("rotated", "pca-ogd"), weights=True)
    workshop.train([run])
    found = workshop.looked(kernel_change.LOOK, run)
    assert np.shape(found["since start"]) == (len(run.config.seed_list()), run.config.tasks)
    remove_weights(workshop, run)
    again = Workshop(tiny, workshop.runs, None, "cpu", {})
    assert again.has_looked(kernel_change.LOOK, run)
    assert again.looked(replace(kernel_change.LOOK, find=None), run) == found
    assert list(again.used) == [run.key]
    assert again.glances[0].seconds > 0
    assert not again.has_looked(overlap_later.LOOK, run)
    newer = replace(kernel_change.LOOK, version=kernel_change.LOOK.version + 1)
    assert not again.has_looked(newer, run)
    assert kernel_change.LOOK.version == 2  # what the first found has no "captured"
    write_beside(workshop.runs / run.key, "kernel-change", [1, tiny.name], asdict(again.glances[0]))
    assert not again.has_looked(kernel_change.LOOK, run)
    assert again.has_looked(replace(kernel_change.LOOK, version=1), run)
    again.looked(replace(kernel_change.LOOK, find=lambda workshop, run: found), run)
    assert not Workshop(replace(tiny, name="large"), workshop.runs, None, "cpu", {}).has_looked(
        kernel_change.LOOK, run
    )
    record = workshop.runs / run.key / "trace.json"
    record.write_text(record.read_text() + "\n")  # another trace
    assert not again.has_looked(kernel_change.LOOK, run)


def test_a_run_is_looked_at_as_soon_as_it_is_trained(tiny, tmp_path, monkeypatch):
    runs = [Run(tiny.config("rotated", "ogd", memory=m)) for m in (2, 4)]
    lost, begun, done = [4], [], []

    def find(workshop, run):
        if run.config.options["memory"] in lost:
            raise RuntimeError("the machine is taken away")
        return [run.config.options["memory"], len(workshop.trace(run).weights(0, 1))]

    look = Look("two", find)

    def measure(workshop):
        return {str(run.config.options["memory"]): workshop.looked(look, run) for run in runs}

    def watch(stage):
        done.append(stage.done)
        if stage.fresh and stage.event is not None:
            begun.append(stage.event.job.order.folder.name)

    two = Artefact(
        "two",
        "two runs",
        "nowhere",
        measure,
        lambda *_: [],
        all_or_nothing(lambda _: runs),
        look=look,
    )
    monkeypatch.setattr(sys.modules[build.__module__], "ARTEFACTS", {"two": two})
    plan = Plan(tiny, tmp_path / "runs", tmp_path / "results", device="cpu")
    with pytest.raises(RuntimeError, match="taken away"):
        build([two], plan, watch)
    assert begun == [run.key for run in runs]
    assert done == sorted(done)  # what is done stays done
    assert done[-1] == pytest.approx(sum(run.effort for run in runs))
    for folder in plan.runs.glob("*/seed-*"):
        shutil.rmtree(folder)
    lost.clear()
    begun.clear()
    build([two], plan, watch)
    assert begun == [runs[1].key]  # what was found in the first one was kept
    record = load_results(plan.results, ["two"])["two"]
    assert record["data"] == {"2": [2, 6], "4": [4, 6]}
    assert record["provenance"]["looked at on"] == ["cpu"]


def test_a_trace_without_weights_will_do_for_what_needs_none(tiny, tmp_path, monkeypatch):
    run = Run(tiny.config("rotated", "sgd"))

    def artefact(name, look=None):
        def measure(workshop):
            return {"accuracy": workshop.trace(run).accuracy[0]}

        return Artefact(
            name,
            name,
            "nowhere",
            measure,
            lambda *_: [],
            all_or_nothing(lambda _: [run]),
            look=look,
        )

    plain, looking = (
        artefact("plain"),
        artefact("looking", Look("looking", lambda workshop, run: 1)),
    )
    workshop = Workshop(tiny, tmp_path / "runs", None, "cpu", {})
    workshop.train([run])
    assert plain.has(workshop, run)
    assert not looking.has(workshop, run)
    # One that has to be trained is trained for both.
    monkeypatch.setattr(sys.modules[build.__module__], "ARTEFACTS", {"a": plain, "b": looking})
    shutil.rmtree(tmp_path / "runs")
    build(
        [plain], Plan(tiny, tmp_path / "runs", tmp_path / "results", device="cpu"), lambda _: None
    )
    assert looking.has(workshop, run)


@pytest.mark.parametrize(("method", "storage"), methods_summary.KEPT)
def test_bytes_of_many_tasks_follow_from_three(tiny, tmp_path, method, storage):
    settings = {**tiny.benchmarks["rotated"].settings, "tasks": 7}
    benchmark = replace(tiny.benchmarks["rotated"], settings=settings)
    workshop = Workshop(replace(tiny, benchmarks={"rotated": benchmark}), tmp_path, None, "cpu", {})
    config = workshop.scale.config("rotated", method, seeds="1", storage=storage)
    replay = workshop.untrained(config)
    for task in range(6):
        replay.remember(task)
    found = methods_summary.kept_bytes(workshop, "rotated", method, storage)
    assert found == replay.kept_bytes()
    state = replay.learner.state
    if method == "gem-nt":  # a replay holds its samples itself, as many as A-GEM's
        assert found == methods_summary.kept_bytes(workshop, "rotated", "a-gem", storage)
    else:
        whole = [state] if isinstance(state, Subspace) else state.tensors(0).values()
        assert found == sum(part.nbytes for part in whole)


def test_rows_in_bfloat16_take_half_the_bytes(tiny, workshop):
    half, whole = (
        methods_summary.kept_bytes(workshop, "rotated", "pca-ogd", storage)
        for storage in ("bfloat16", "dense")
    )
    moments = 8 * tiny.memory**2
    assert half - moments == (whole - moments) / 2


def test_the_estimated_effort_is_what_runs_took():
    """Time left is told from it: the longest run of Table 1 takes a hundred times the shortest."""
    cells = [(b, m) for b in FULL.benchmarks for m in METHODS]
    runs = [Run(FULL.config(b, m)) for b, m in cells]
    folders = [TABLE1 / run.config.scenario / run.config.method for run in runs]
    seconds = np.array([load_trace(folder).timings["total"] for folder in folders])
    efforts = np.array([run.effort for run in runs])
    efforts *= seconds.sum() / efforts.sum()
    long = seconds > 2
    assert np.abs(np.log2(efforts / seconds))[long].max() < 0.5
    assert efforts[~long].max() < 3
    half, whole = (
        Run(FULL.config("rotated", "ogd", storage=s)).effort for s in ("bfloat16", "dense")
    )
    assert half < whole
    assert Run(FULL.config("cifar", "ogd")).effort < Run(FULL.config("cifar", "pca-ogd")).effort


def test_a_strength_that_was_searched_is_not_searched_again():
    """The protocols need the runs of a search only as long as they do not know its result."""
    tried = {f"{s:g}": [s] for s in SMALL.strengths}
    search = {f"{b} {p}": tried for b, p in strength.variants(SMALL)}
    before, after = (
        {run.key for run in protocols.parts(SMALL, results)["rotated/corrected/ewc"]}
        for results in ({}, {"ewc-strength": {"data": search}})
    )
    searches = {
        run.key
        for part, runs in strength.parts(SMALL, {}).items()
        if part.startswith("rotated corrected/")
        for run in runs
    }
    assert len(searches) == len(SMALL.strengths)
    assert searches <= before
    assert searches.isdisjoint(after)
    assert len(after - before) == 1  # with the strength that was chosen
    assert len(protocols.parts(SMALL, {})["rotated/released/ewc"]) == 1  # that searches nothing


def test_a_search_of_which_all_diverged_is_over():
    """Then there is no strength to choose, and nothing is searched again."""
    search = {"rotated corrected": dict.fromkeys(map("{:g}".format, SMALL.strengths))}
    results = {"ewc-strength": {"data": search}}
    assert protocols.parts(SMALL, results)["rotated/corrected/ewc"] == []
