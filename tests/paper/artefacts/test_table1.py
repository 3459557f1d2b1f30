"""Agreement with the printed cells."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_ind_from_stats

from forgetless.paper.artefacts import table1
from forgetless.paper.printed import TABLE1, Cell
from forgetless.paper.results import load_results
from forgetless.support.statistics import mean

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("shift", "agrees"), [(0.0, True), (1.1, True), (1.3, False)])
def test_a_cell_agrees_where_welchs_test_does_not_reject(shift, agrees):
    seeds = np.array([79.0, 80.0, 80.5, 81.0, 79.5]) + shift
    cell = Cell(80.0, 0.8, 1.0, 0.1)  # its spread divides by n
    assert table1.agreement(cell, {"average": seeds})[0] is agrees
    theirs = cell.accuracy_std * (5 / 4) ** 0.5
    test = ttest_ind_from_stats(
        seeds.mean(), seeds.std(ddof=1), 5, cell.accuracy, theirs, 5, equal_var=False
    )
    assert bool(test.pvalue >= 0.05) is agrees


def test_the_docs_have_the_largest_difference_in_forgetting():
    table = load_results(ROOT / "results/paper", ["table1"])["table1"]["data"]["rotated"]
    most = max(TABLE1["rotated"][m].forgetting - mean(of["forgetting"]) for m, of in table.items())
    text = " ".join((ROOT / "docs/usage.md").read_text("utf-8").split())
    assert f"on Rotated MNIST by up to {most:.1f} points" in text
