"""Intervals and tests between the entries of a comparison, against SciPy's."""

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import sem, t, ttest_rel

from forgetless import ConfigError
from forgetless.report import comparison_table, ranking, rows
from forgetless.report.comparison import compare
from forgetless.support.statistics import holm
from forgetless.trace import Trace
from tests.report.test_tables import text

METHODS = ("sgd", "ewc", "kron-ogd")
VALUES = np.random.default_rng(5).normal([[60], [75], [76]], 2, (3, 6))


def run(method, values, seeds=None, **config):
    """A trace whose A_T are these values, one for each seed."""
    seeds = tuple(range(len(values))) if seeds is None else seeds
    accuracy = np.full((len(values), 2, 2), np.nan)
    accuracy[:, 0, 0] = 90
    accuracy[:, 1] = np.asarray(values)[:, None]
    settings = {"scenario": "blobs", "method": method, **config}
    return Trace("blobs", method, seeds, ("a", "b"), accuracy, settings, status="complete")


@pytest.fixture
def runs():
    return [run(method, values) for method, values in zip(METHODS, VALUES, strict=True)]


def test_intervals_are_students(runs):
    for place, values in zip(ranking(runs).places, VALUES, strict=True):
        low, high = t.interval(0.95, len(values) - 1, values.mean(), sem(values))
        found = place.intervals["average_accuracy"]
        assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))


def test_all_pairs_are_tested_and_corrected_together(runs):
    made = ranking(runs)
    pairs = [*combinations(range(3), 2)]
    raw = [ttest_rel(VALUES[a], VALUES[b]).pvalue for a, b in pairs]
    expected = dict(zip(pairs, holm(raw), strict=True))
    assert made.reference.trace.method == METHODS[VALUES.mean(1).argmax()] == "kron-ogd"
    found = [place.p for place in made.places]
    assert found[:2] == pytest.approx([expected[0, 2], expected[1, 2]])
    assert np.isnan(found[2])
    assert made.tests == 3
    difference = made.places[0].difference
    interval = ttest_rel(VALUES[0], VALUES[2]).confidence_interval()
    low, high = difference.mean - difference.half, difference.mean + difference.half
    assert (low, high) == pytest.approx((interval.low, interval.high))


def test_with_a_chosen_reference_only_its_pairs_are_tested(runs):
    made = ranking(runs, against="sgd")
    expected = holm([ttest_rel(VALUES[0], VALUES[n]).pvalue for n in (1, 2)])
    assert [place.p for place in made.places][1:] == pytest.approx(expected)
    assert made.tests == 2
    assert "less that of SGD, paired" in made.footnote
    assert "Holm's correction for 2 tests" in made.footnote
    assert ranking(runs, against="KronOGD").reference.trace.method == "kron-ogd"
    with pytest.raises(ConfigError, match="against must be one of SGD, EWC, KronOGD, not 'gpm'"):
        ranking(runs, against="gpm")


def test_the_footnote_names_the_test_and_its_least_p(runs):
    assert "p: paired t-test, Holm's correction for 3 tests." in ranking(runs).footnote
    footnote = ranking(runs, test="permutation").footnote
    assert "p: permutation test" in footnote
    assert "With 6 seeds p is at least 0.0312" in footnote
    with pytest.raises(ConfigError, match="t or permutation"):
        ranking(runs, test="wilcoxon")


def test_seeds_are_paired_by_number():
    """Whatever their order, and those that only one of the runs has do not count."""
    one, other = run("sgd", VALUES[0]), run("ewc", VALUES[1][::-1], seeds=(5, 4, 3, 2, 1, 0))
    p = ranking([one, other]).places[0].p
    assert p == pytest.approx(ttest_rel(VALUES[0], VALUES[1]).pvalue)
    fewer = run("ewc", VALUES[1][2:], seeds=(2, 3, 4, 5))
    p = ranking([one, fewer]).places[0].p
    assert p == pytest.approx(ttest_rel(VALUES[0][2:], VALUES[1][2:]).pvalue)


def test_all_data_is_no_rival(runs):
    made = ranking([*runs, run("joint", VALUES[2] + 15)])
    assert made.reference.trace.method == "kron-ogd"
    assert "less that of KronOGD, the best that does not keep all data" in made.footnote


def test_one_seed_has_no_interval_and_no_test():
    runs = [run("sgd", [60.0]), run("ewc", [70.0])]
    made = ranking(runs)
    assert not made.is_tested
    shown = text(comparison_table(runs))
    assert "±" not in shown
    assert " p " not in shown
    with pytest.raises(ConfigError, match="against SGD needs two seeds"):
        ranking(runs, against="sgd")
    first = rows(runs)[0]
    assert (first["average_accuracy"], first["average_accuracy_interval"], first["p"]) == (
        60.0, None, None,
    )  # fmt: skip


def test_what_did_not_finish_has_no_p():
    broken = run("ewc", [70.0, 71.0])
    broken.accuracy[:] = np.nan
    made = ranking(compare([run("sgd", [60.0, 61.0]), broken])[0])
    assert made.places[1].intervals["average_accuracy"] is None
    assert "–" in text(comparison_table(made))
