"""The workshop: no run is trained twice, and no probe measures twice."""

import shutil
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest

from forgetless.paper.artefacts import (
    kernel_change,
    overlap,
)
from forgetless.paper.benchmarks import Run
from forgetless.paper.build import Plan, build
from forgetless.paper.numbers import accuracies
from forgetless.paper.results import load_results
from forgetless.paper.workshop import Artefact, Probe, Workshop
from forgetless.trace.trace import write_beside


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


def remove_weights(workshop, run):
    for folder in (workshop.runs / run.key).glob("seed-*"):
        shutil.rmtree(folder)


def test_what_was_found_in_weights_outlives_them(tiny, workshop):
    run = Run(tiny.config("rotated", "pca-ogd"), weights=True)
    workshop.train([run])
    found = workshop.probe(kernel_change.PROBE, run)
    assert np.shape(found["since start"]) == (len(run.config.seed_list()), run.config.tasks)
    remove_weights(workshop, run)
    again = Workshop(tiny, workshop.runs, None, "cpu", {})
    assert again.has_probed(kernel_change.PROBE, run)
    assert again.probe(replace(kernel_change.PROBE, measure=None), run) == found
    assert list(again.used) == [run.key]
    assert again.probed[0].seconds > 0
    assert not again.has_probed(overlap.LATER_PROBE, run)
    newer = replace(kernel_change.PROBE, version=kernel_change.PROBE.version + 1)
    assert not again.has_probed(newer, run)
    assert kernel_change.PROBE.version == 2  # what the first found has no "captured"
    write_beside(workshop.runs / run.key, "kernel-change", [1, tiny.name], asdict(again.probed[0]))
    assert not again.has_probed(kernel_change.PROBE, run)
    assert again.has_probed(replace(kernel_change.PROBE, version=1), run)
    again.probe(replace(kernel_change.PROBE, measure=lambda workshop, run: found), run)
    assert not Workshop(replace(tiny, name="large"), workshop.runs, None, "cpu", {}).has_probed(
        kernel_change.PROBE, run
    )
    record = workshop.runs / run.key / "trace.json"
    record.write_text(record.read_text() + "\n")  # another trace
    assert not again.has_probed(kernel_change.PROBE, run)


def test_a_run_is_looked_at_as_soon_as_it_is_trained(tiny, tmp_path, monkeypatch):
    runs = [Run(tiny.config("rotated", "ogd", memory=m)) for m in (2, 4)]
    lost, begun, done = [4], [], []

    def find(workshop, run):
        if run.config.options["memory"] in lost:
            raise RuntimeError("the machine is taken away")
        return [run.config.options["memory"], len(workshop.trace(run).weights(0, 1))]

    probe = Probe("two", find)

    def measure(workshop, cells):
        return {cell: workshop.probe(probe, run) for cell, run in cells.items()}

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
        lambda *_: {str(run.config.options["memory"]): run for run in runs},
        probe=probe,
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
    assert record["provenance"]["probed on"] == ["cpu"]


def test_a_trace_without_weights_will_do_for_what_needs_none(tiny, tmp_path, monkeypatch):
    run = Run(tiny.config("rotated", "sgd"))

    def artefact(name, probe=None):
        def measure(workshop, cells):
            return {"accuracy": workshop.trace(run).accuracy[0]}

        return Artefact(
            name,
            name,
            "nowhere",
            measure,
            lambda *_: [],
            lambda *_: {"run": run},
            probe=probe,
        )

    plain, looking = (
        artefact("plain"),
        artefact("looking", Probe("looking", lambda workshop, run: 1)),
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
