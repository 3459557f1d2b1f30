"""A_T, F_T, BWT and FWT from the accuracy matrix alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgetless import average_accuracy, backward_transfer, forgetting, forward_transfer
from forgetless.trace import tasks_learned

nan = float("nan")
MATRIX = [[90, nan, nan], [70, 80, nan], [75, 60, 95]]


def test_worked_example():
    assert average_accuracy(MATRIX) == pytest.approx((75 + 60 + 95) / 3)
    assert forgetting(MATRIX) == pytest.approx(((90 - 75) + (80 - 60)) / 2)
    assert backward_transfer(MATRIX) == pytest.approx(((75 - 90) + (60 - 80)) / 2)


def test_forgetting_counts_from_the_best_not_from_the_first():
    improved = [[50, nan], [60, 90]]
    assert forgetting(improved) == 0
    assert backward_transfer(improved) == 10


def test_forward_transfer_needs_accuracies_measured_beforehand():
    assert np.isnan(forward_transfer(MATRIX))
    full = [[90, 30, 10], [70, 80, 20], [75, 60, 95]]
    assert forward_transfer(full, baseline=[0, 10, 10]) == pytest.approx((20 + 10) / 2)


def test_one_task_forgets_nothing():
    assert forgetting([[80]]) == backward_transfer([[80]]) == forward_transfer([[80]]) == 0
    assert average_accuracy([[80]]) == 80


def test_a_run_that_stopped_counts_up_to_the_last_task_it_learned():
    stopped = [[90, nan, nan], [70, 80, nan], [nan, nan, nan]]
    assert average_accuracy(stopped) == 75
    assert forgetting(stopped) == 20
    assert np.isnan(average_accuracy(np.full((2, 2), nan)))
    assert tasks_learned(stopped) == 2
    assert tasks_learned([stopped, [[90, nan, nan]] + [[nan] * 3] * 2]) == 1
    assert tasks_learned(np.full((2, 2), nan)) == 0
    assert tasks_learned(np.ones((4, 3, 3))) == 3


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_seeds_are_taken_one_by_one(tasks, seed):
    many = np.random.default_rng(seed).uniform(0, 100, (3, tasks, tasks))
    for metric in (average_accuracy, forgetting, backward_transfer, forward_transfer):
        np.testing.assert_allclose(metric(many), [metric(one) for one in many])
    assert (forgetting(many) >= -backward_transfer(many) - 1e-9).all()


@pytest.mark.parametrize("bad", [[1, 2], [[1, 2]], np.zeros((0, 0))])
def test_other_shapes_are_refused(bad):
    with pytest.raises(ValueError, match=r"\(\*, T, T\)"):
        average_accuracy(bad)
