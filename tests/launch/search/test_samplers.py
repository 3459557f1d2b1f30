"""Samplers on scores that are functions."""

import math
import sys

import pytest

from forgetless import ConfigError
from forgetless.launch.search.samplers import TPE, Grid
from forgetless.support.validation import SHARE, real, whole
from tests.launch.search.problems import dimension, searched

LR = dimension((0.001, 0.003, 0.01), real(0), "lr")
STRENGTH = dimension((1.0, 10.0, 30.0), real(0), "strength")


def peak(lr, strength):
    """A score that falls on both sides of these settings."""

    def score(settings):
        distance = math.log(settings["lr"] / lr) ** 2
        return -distance - math.log(settings["strength"] / strength) ** 2

    return score


def best(known):
    return max(known, key=known.get)


def test_a_grid_is_all_combinations():
    known, rounds = searched(Grid((LR, STRENGTH)), peak(1, 1))
    assert rounds == [9]
    assert len(known) == 9


def test_an_extended_grid_goes_on_until_all_neighbours_were_tried():
    grid = Grid((LR, STRENGTH), extend=True)
    known, rounds = searched(grid, peak(0.1, 100))
    assert best(known) == '{"lr": 0.1, "strength": 100.0}'
    for lr, strength in ((0.03, 100), (0.3, 100), (0.1, 30), (0.1, 300)):
        assert f'{{"lr": {lr}, "strength": {float(strength)}}}' in known
    assert rounds[0] == 9
    assert grid.limits({"lr": 0.1, "strength": 100.0}) == []


def test_a_grid_that_holds_the_peak_is_not_extended_beyond_its_neighbours():
    known, rounds = searched(Grid((LR, STRENGTH), extend=True), peak(0.003, 10))
    assert rounds == [9]
    assert len(known) == 9


def test_what_diverges_is_no_best_and_ends_the_extension():
    def score(settings):
        return -math.inf if settings["lr"] > 0.01 else settings["lr"]

    grid = Grid((LR,), extend=True)
    known, _ = searched(grid, score)
    assert best(known) == '{"lr": 0.01}'
    assert known['{"lr": 0.03}'] == -math.inf
    assert grid.limits({"lr": 0.01}) == []
    known, rounds = searched(Grid((LR,), extend=True), lambda settings: -math.inf)
    assert rounds == [3]


def test_an_extension_without_a_peak_ends_and_says_so():
    grid = Grid((LR,), extend=True)
    known, rounds = searched(grid, lambda settings: settings["lr"])
    assert len(rounds) == 21
    last = max(known, key=known.get)
    assert grid.limits({"lr": known[last]}) == [f"lr {known[last]:g} is the largest value tried"]


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.01, ["lr 0.01 is the largest value tried"]), (0.003, []),
     (0.001, ["lr 0.001 is the smallest value tried"])],
)  # fmt: skip
def test_the_end_of_a_grid_is_said(value, words):
    assert Grid((LR,)).limits({"lr": value}) == words


def test_an_end_that_is_the_option_s_own_is_no_limit():
    assert Grid((dimension((1, 2), whole(1), "n"),)).limits({"n": 1}) == []


def test_a_method_without_options_is_one_trial():
    assert searched(Grid((), extend=True), lambda settings: 1.0) == ({"{}": 1.0}, [1])


def test_tpe_finds_the_peak_within_the_range_the_same_every_time():
    pytest.importorskip("optuna")
    space = (dimension((0.0001, 1.0), real(0), "lr"), STRENGTH)
    known, rounds = searched(TPE(space, 42), peak(0.01, 10))
    assert (sum(rounds), max(rounds)) == (42, 5)
    again, _ = searched(TPE(space, 42), peak(0.01, 10))
    assert known == again
    assert max(known.values()) > -0.3
    late = list(known.values())[-10:]
    assert sum(late) / 10 > sum(list(known.values())[:10]) / 10  # it learns


def test_tpe_keeps_counts_shares_and_texts():
    pytest.importorskip("optuna")
    space = (
        dimension((1, 64), whole(1), "n"),
        dimension((0.9, 0.99), SHARE, "share"),
        dimension(("sgd", "adam"), None, "optimizer"),
        dimension((5,), whole(1), "fixed"),
    )
    sampler, seen = TPE(space, 12), []
    for new in sampler.rounds(lambda settings: 1.0):
        seen += new
    assert len(seen) == 12
    assert all(type(s["n"]) is int and 1 <= s["n"] <= 64 for s in seen)
    assert all(0.9 <= s["share"] <= 0.99 and s["fixed"] == 5 for s in seen)
    assert {s["optimizer"] for s in seen} == {"sgd", "adam"}
    assert sampler.limits({"n": 63, "share": 0.95, "optimizer": "sgd", "fixed": 5}) == [
        "n 63 is near the largest value allowed"
    ]


def test_tpe_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'forgetless\[optuna\]'"):
        TPE((LR,), 5)
