"""Intervals and tests, against SciPy's."""

from math import inf, isnan, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import permutation_test, sem, ttest_ind, ttest_rel
from scipy.stats import t as student_t

from forgetless.support.statistics import (
    ahead,
    apart,
    estimate,
    holm,
    none,
    paired_p,
    standard_error,
    student,
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


def test_students_t_is_scipys():
    for freedom in (1, 2, 4, 5.5, 99):
        assert student(freedom) == pytest.approx(student_t.ppf(0.975, freedom))
    assert student(0) == inf


@pytest.mark.parametrize("count", [2, 5, 10, 14])
def test_paired_tests_are_scipys(count):
    one, other = np.random.default_rng(count).normal([[0.4], [0]], size=(2, count))
    assert paired_p(one, other) == pytest.approx(ttest_rel(one, other).pvalue, rel=1e-12)
    exact = permutation_test(
        (one, other), lambda x, y: (x - y).mean(), permutation_type="samples", n_resamples=inf
    )
    assert paired_p(one, other, "permutation") == pytest.approx(exact.pvalue, rel=1e-12)


def test_signs_are_drawn_where_there_are_too_many():
    one, other = np.random.default_rng(3).normal([[0.5], [0]], size=(2, 16))
    exact = permutation_test(
        (one, other), lambda x, y: (x - y).mean(), permutation_type="samples", n_resamples=inf
    )
    drawn = paired_p(one, other, "permutation")
    error = (exact.pvalue * (1 - exact.pvalue) / 20_000) ** 0.5
    assert drawn == pytest.approx(exact.pvalue, abs=5 * error)
    assert drawn == paired_p(one, other, "permutation")


def test_what_does_not_differ_and_what_cannot_be_tested():
    assert paired_p(ONE, ONE) == paired_p(ONE, ONE, "permutation") == 1
    assert isnan(paired_p([1.0], [2.0]))
    assert paired_p([2.0, 3.0], [1.0, 2.0]) == 0  # every seed by the same amount


def test_holms_correction_rejects_step_by_step():
    """The example of Holm's procedure: at 5 % the first two of four are rejected."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    found = holm([0.02, nan, 0.9])
    assert isnan(found[1])
    assert found[::2] == pytest.approx([0.04, 0.9])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.999))
def test_holms_correction_is_the_sequential_procedure(p_values, level):
    rejected = set()
    for n in sorted(range(len(p_values)), key=lambda n: p_values[n]):
        if p_values[n] * (len(p_values) - len(rejected)) > level:
            break
        rejected.add(n)
    assert {n for n, p in enumerate(holm(p_values)) if p <= level} == rejected
