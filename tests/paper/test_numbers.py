"""The rules by which numbers agree, against SciPy's tests."""

from math import inf, isnan

import numpy as np
import pytest
from scipy.stats import binomtest, permutation_test, spearmanr

from forgetless.paper.claims.base import FAILS, HOLDS, UNDECIDED, inside
from forgetless.paper.numbers import by_chance, rank_correlation


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
