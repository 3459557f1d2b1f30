"""Agreement with the printed cells."""

from pathlib import Path

import pytest

from forgetless.paper.artefacts import table1
from forgetless.paper.numbers import mean
from forgetless.paper.printed import TABLE1, Cell
from forgetless.paper.results import load_results

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("average", "agrees"), [([80.0, 80.0], True), ([81.4, 81.4], True), ([81.6, 81.6], False)]
)
def test_a_cell_agrees_within_the_allowance(average, agrees):
    assert table1.agreement(Cell(80.0, 0.1, 1.0, 0.1), {"average": average})[0] is agrees


def test_the_spread_of_both_widens_the_allowance():
    good, difference, allowed = table1.agreement(Cell(80.0, 3.0, 1, 1), {"average": [85.0, 93.0]})
    assert (good, difference) == (True, 9.0)
    assert allowed == pytest.approx(10.0)


def test_the_docs_have_the_largest_difference_in_forgetting():
    table = load_results(ROOT / "results/paper", ["table1"])["table1"]["data"]["rotated"]
    most = max(TABLE1["rotated"][m].forgetting - mean(of["forgetting"]) for m, of in table.items())
    text = " ".join((ROOT / "docs/usage.md").read_text("utf-8").split())
    assert f"on Rotated MNIST by up to {most:.1f} points" in text
