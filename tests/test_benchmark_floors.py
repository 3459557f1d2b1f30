"""What the benchmarks compare with, and that measuring a part of them loses nothing of the rest."""

import importlib
import json
from pathlib import Path

import pytest
from benchmarks import gpu, tables


@pytest.fixture
def tangent(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(tables.__file__).parent))
    return importlib.import_module("benchmarks.tangent")


def test_of_a_floor_of_two_passes_one_is_told_too():
    projection = {"ours_s": 1.0, "times_floor": 0.9, "spread": [0.8, 1.1], "columns_over_ours": 2.0}
    case = {"model": "m", "parameters": 9, "directions": 5, "overhead": 1.0, "spread": [1.0, 1.0]}
    for passes, words in ((1, "0.90 (0.80 to 1.10) of 1 pass |"), (2, "of 2 passes, 1.80 of 1 |")):
        text = tables.guard({"cases": [case | {"projection": projection | {"passes": passes}}]})
        assert words in text


def test_the_end_of_a_task_is_told_with_and_without_eigenvectors():
    case = {"model": "m", "samples": 3000, "end_task_s": 1.25, "times_pass": [4.0, 5.0, 9.0]}
    case |= {"without_eigh_times_pass": [2.0, 2.5, 3.0], "times_floor": [1.0, 1.5, 2.0]}
    of = {"device": "cpu", "threads": 1, "versions": {"torch": "2"}, "cases": [case]}
    row = "| m, 3,000 samples | 1.25 | 5.00 (4.00 to 9.00) | 2.50 (2.00 to 3.00) | 1.50 (1.00 to "
    assert row in tables.end_task(of)


def test_a_floor_has_the_rate_of_the_precision_that_is_computed_in(tangent):
    slow, fast = {"torch.float64": 1.0, "torch.float32": 2.0}, {"torch.float32": 2.0}
    gram, top = tangent.floors(30, slow)
    assert tangent.floors(30, fast | {"torch.float64": 4.0}) == (gram / 4, top)
    half = tangent.floors(30, {"torch.float64": 1.0, "torch.float32": 4.0})
    assert half == (gram, top / 2)


def run(scenario: str, method: str, seconds: float, torch: str | None = None) -> dict:
    parts = dict.fromkeys(("training", "consolidation", "evaluation"), 1.0)
    versions = {"versions": {"device": "H", "torch": torch}} if torch else {}
    accuracy = {"average_accuracy": [1.0]}
    return {"scenario": scenario, "method": method, "seconds": seconds, "parts": parts} | (
        accuracy | versions
    )


def test_runs_that_are_not_measured_again_stay():
    old = [run("split-mnist", "sgd", 1.0), run("rotated-mnist", "pca-ogd", 2.0)]
    report = {"runs": old, "versions": {"runs": {"device": "H", "torch": "1"}}}
    new = [run("rotated-mnist", "pca-ogd", 3.0, "2"), run("split-mnist", "ewc", 4.0, "2")]
    found = gpu.merged(report, new)
    seconds = [(r["method"], r["seconds"], r["versions"]["torch"]) for r in found]
    assert seconds == [("sgd", 1.0, "1"), ("ewc", 4.0, "2"), ("pca-ogd", 3.0, "2")]
    assert gpu.merged({}, new) == [new[1], new[0]]
    text = tables.runs(report | {"runs": found})
    assert "\nH, torch 1; H, torch 2. From the configuration" in text


def test_cells_that_are_named():
    assert gpu.chosen("") == gpu.RUNS
    assert len(gpu.chosen("ewc")) == 3
    assert len(gpu.chosen("pca-ogd")) == 4
    assert {s for s, _ in gpu.chosen("split-mnist,permuted-mnist")} == {
        "split-mnist",
        "permuted-mnist",
    }


def test_a_guard_on_a_gpu_has_a_table_where_it_was_measured(tmp_path):
    text = (tables.FOLDER / "guard-cpu.json").read_text("utf-8")
    (tmp_path / "guard-cuda.json").write_text(text, "utf-8")
    page = tables.page(tmp_path)
    assert "## What a guard costs on one GPU\n" in page
    assert tables.guard(json.loads(text)) in page
