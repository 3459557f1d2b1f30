"""Bounds that hold, and where the printed ones do not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgetless.theory import (
    ComponentProjection,
    GradientProjection,
    LinearTask,
    NoProjection,
    SampleProjection,
    bounds,
    decompose,
    learn,
)
from tests.theory.problems import METHODS, network_tasks, pairs, random_tasks


def task(rows: list[list[float]], targets: list[float]) -> LinearTask:
    features = torch.tensor(rows, dtype=torch.float64)
    y = torch.tensor(targets, dtype=torch.float64)
    return LinearTask(features, y, torch.zeros_like(y))


@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(2, 4), min_size=2, max_size=4),
    p=st.integers(1, 8),
    whole=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1, 3.0]),
    kept=st.integers(1, 2),
    data=st.data(),
)
def test_valid_bounds_hold(seed, sizes, p, whole, weight_decay, kept, data):
    methods = [
        NoProjection(),
        SampleProjection(kept),
        ComponentProjection(kept),
        ComponentProjection(kept, centred=True),
        GradientProjection(kept),
        SampleProjection(),
    ]
    method = data.draw(st.sampled_from(methods))
    tasks = random_tasks(seed, sizes, p, whole=whole)
    solved = learn(tasks, method, weight_decay=weight_decay)
    for s, t in pairs(len(tasks)):
        measured = float(solved.drift(s, t).square().sum())
        b = bounds(solved, s, t)
        slack = 1e-9 * (1 + b.valid)
        assert measured <= b.tight + slack
        assert b.tight <= b.valid + slack
        if isinstance(method, ComponentProjection) and method.centred:
            continue
        assert b.valid <= (t - s) * b.printed + slack
        if t == s + 1:  # one later task: what is printed is true
            assert b.printed == pytest.approx(b.valid)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_they_hold_for_a_network(method):
    solved = learn(network_tasks("cnn"), method, weight_decay=0.2)
    for s, t in pairs(4):
        b = bounds(solved, s, t)
        assert decompose(solved, s, t).total <= b.tight <= b.valid * (1 + 1e-12)


def test_the_printed_bound_of_sgd_fails_for_two_later_tasks():
    # One parameter, one sample, φ = 1: the targets 0, 1, 2 are learned one after another.
    solved = learn([task([[1]], [y]) for y in (0, 1, 2)], NoProjection())
    assert float(solved.drift(0, 2).square().sum()) == 4
    b = bounds(solved, 0, 2)
    assert (b.printed, b.valid, b.tight) == (2, 4, 4)


def test_the_printed_bound_of_gem_nt_fails_likewise():
    # What it remembers of task 1, the second sample, keeps its loss of zero.
    tasks = [task([[1, 0], [0, 1]], [0, 0]), task([[1, 0]], [1]), task([[1, 0]], [2])]
    solved = learn(tasks, GradientProjection(memory=[torch.tensor([1]), torch.tensor([0])]))
    assert float(solved.drift(0, 2).square().sum()) == pytest.approx(4)
    b = bounds(solved, 0, 2)
    assert (b.printed, b.valid, b.tight) == pytest.approx((2, 4, 4))


def test_the_printed_bound_of_pca_ogd_fails_likewise():
    tasks = [
        task([[2, 0, 0], [0, 1, 0]], [0, 0]),
        task([[0, 1, 0], [0, 0, 2]], [1, 0]),
        task([[0, 1, 0]], [2]),
    ]
    solved = learn(tasks, ComponentProjection(components=1))
    assert float(solved.drift(0, 2).square().sum()) == pytest.approx(4)
    b = bounds(solved, 0, 2)
    assert (b.printed, b.valid, b.tight) == pytest.approx((2, 4, 4))


@pytest.mark.parametrize("later", [1, 2, 5, 10])
def test_it_is_off_by_the_number_of_later_tasks(later):
    solved = learn([task([[1]], [y]) for y in range(later + 1)], NoProjection())
    b = bounds(solved, 0, later)
    assert float(solved.drift(0, later).square().sum()) == pytest.approx(later * b.printed)
    assert b.valid == pytest.approx(later * b.printed)


def test_centred_pca_breaks_the_bound_with_one_later_task():
    # The mean (3, 0) is the largest part of φ and not among the centred directions.
    tasks = [task([[3, 1], [3, -1]], [0, 0]), task([[1, 0]], [1])]
    centred = learn(tasks, ComponentProjection(components=1, centred=True))
    assert float(centred.drift(0, 1).square().sum()) == pytest.approx(18)
    b = bounds(centred, 0, 1)
    assert (b.printed, b.valid, b.tight) == pytest.approx((2, 18, 18))
    uncentred = learn(tasks, ComponentProjection(components=1))
    assert float(uncentred.drift(0, 1).norm()) < 1e-12


def test_pca_ogd_that_keeps_everything_is_bounded_by_zero():
    solved = learn(random_tasks(0, (3, 3), 9), ComponentProjection())
    b = bounds(solved, 0, 1)
    assert b.printed == b.valid == 0
    assert b.tight < 1e-20
