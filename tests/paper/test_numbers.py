"""The rules by which numbers agree, against SciPy's tests."""

from math import inf, isnan

import numpy as np
import pytest
from scipy.stats import binomtest, permutation_test, sem, spearmanr, ttest_ind, ttest_rel

from forgetless.paper.claims.base import FAILS, HOLDS, UNDECIDED, inside
from forgetless.paper.numbers import (
    ahead,
    apart,
    by_chance,
    estimate,
    none,
    rank_correlation,
    standard_error,
    two,
)

ONE, OTHER = np.array([80.0, 81.5, 79.2, 82.0, 80.3]), np.array([79.0, 80.9, 79.5, 80.0, 79.9])


def test_intervals_are_those_of_the_t_tests():
    lead, noise = ahead(ONE, OTHER)
    found = ttest_rel(ONE, OTHER).confidence_interval()
    assert (lead - noise, lead + noise) == pytest.approx((found.low, found.high))
    lead, noise = apart(estimate(ONE), estimate(OTHER[:4]))
    found = ttest_ind(ONE, OTHER[:4], equal_var=False).confidence_interval()
    assert (lead - noise, lead + noise) == pytest.approx((found.low, found.high))


def test_other_margins_are_two_errors_and_none():
    errors = 2 * sem(ONE - OTHER)
    assert ahead(ONE, OTHER, two)[1] == pytest.approx(errors)
    assert ahead(ONE, OTHER, none)[1] == apart(estimate(ONE), estimate(OTHER), none)[1] == 0


def test_one_seed_says_nothing():
    assert standard_error([80.0]) == inf
    assert ahead([80.0], [70.0])[1] == apart(estimate([80.0]), estimate(OTHER))[1] == inf
    assert ahead([80.0], [70.0], none) == (10.0, 0.0)


@pytest.mark.parametrize("off", [0, 1, 4])
def test_misses_by_chance_are_binomial(off):
    expected = binomtest(off, 20, 0.05, alternative="greater").pvalue
    assert by_chance(off, 20) == pytest.approx(expected)


@pytest.mark.parametrize("count", [5, 7, 12])
def test_rank_correlations_have_the_p_value_of_a_permutation_test(count):
    x, y = np.random.default_rng(count).normal(size=(2, count))
    value, p = rank_correlation(x, y)
    assert value == pytest.approx(spearmanr(x, y).statistic)
    expected = permutation_test(
        (x,), lambda order: spearmanr(order, y).statistic, permutation_type="pairings",
        n_resamples=inf if count == 5 else 3000,
    )  # fmt: skip
    assert p == pytest.approx(expected.pvalue, abs=1e-9 if count == 5 else 0.05)


def test_what_does_not_vary_has_no_rank_correlation():
    assert all(map(isnan, rank_correlation([1, 1, 1], [1, 2, 3])))


@pytest.mark.parametrize(
    ("difference", "noise", "expected"),
    [(0.0, 0.5, HOLDS), (0.0, 1.5, UNDECIDED), (2.0, 0.5, FAILS), (-2.0, 0.5, FAILS)],
)
def test_noise_does_not_help_to_be_the_same(difference, noise, expected):
    assert inside(difference, noise, -1, 1) == expected
