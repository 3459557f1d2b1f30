"""Runs on the benchmarks: their keys, and the estimate of their cost."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forgetless.paper.artefacts import ARTEFACTS
from forgetless.paper.benchmarks import FULL, TABLE1_METHODS, Run
from forgetless.paper.results import load_results
from forgetless.trace import load_trace

TABLE1_RUNS = Path(__file__).parents[2] / "results" / "table1"


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


def test_the_estimated_effort_is_what_runs_took():
    """Time left is told from it: the longest run of Table 1 takes a hundred times the shortest."""
    cells = [(b, m) for b in FULL.benchmarks for m in TABLE1_METHODS]
    runs = [Run(FULL.config(b, m)) for b, m in cells]
    folders = [TABLE1_RUNS / run.config.scenario / run.config.method for run in runs]
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


def test_the_runs_of_the_committed_results_have_the_same_keys():
    """Else they would be trained again; EWC's search is, for its validation images have a seed."""
    results = load_results(Path(__file__).parents[2] / "results/paper", list(ARTEFACTS))
    assert set(ARTEFACTS) - set(results) == {"forgetting-closer"}  # to be trained on a GPU
    for name, artefact in ((name, ARTEFACTS[name]) for name in results):
        known = results[name]["provenance"]["runs"].keys()
        if known and name not in ("ewc-strength", "layers"):
            assert {run.key for run in artefact.runs(FULL, results)} == set(known), name
