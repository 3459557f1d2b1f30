"""Reasons of errors, in a line, and the nearest name to a wrong one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forgetless
from forgetless import Guard, Training
from forgetless.report import plots
from forgetless.support.validation import (
    ConfigError,
    beginnings,
    did_you_mean,
    first_line,
    require,
    unknown,
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one \ntwo"), "one"),
        (ValueError(), "ValueError"),
        (MemoryError(" \n"), "MemoryError"),
    ],
)
def test_the_first_line_of_an_error_says_something(error, reason):
    assert first_line(error) == reason


NAMES = ("sgd", "pca-ogd", "kron-ogd", "Adam-NSCL")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("pca-odg", "pca-ogd"), ("PCA_OGD", "pca-ogd"), ("adam_nscl", "Adam-NSCL"), ("sdg", "sgd")],
)
def test_the_nearest_name_is_suggested_whatever_its_case_and_hyphens(wrong, meant):
    assert did_you_mean(wrong, NAMES) == f": did you mean {meant!r}?"


@pytest.mark.parametrize("other", ["quantum", "", 3, None, ["sgd"]])
def test_nothing_is_suggested_for_what_is_no_slip(other):
    assert did_you_mean(other, NAMES) == ""


@given(st.sampled_from(NAMES), st.integers(0, 8), st.sampled_from("xyz"))
def test_one_letter_too_many_is_found_again(name, place, letter):
    """`difflib` gives such a pair a ratio of at least 6/7, above its cutoff of 0.6."""
    slip = name[: min(place, len(name))] + letter + name[min(place, len(name)) :]
    assert did_you_mean(slip, NAMES) == f": did you mean {name!r}?"


def test_a_long_list_of_names_is_left_out_beside_a_suggestion():
    many = [f"option-{n}" for n in range(40)]
    assert (
        unknown("option", "optoin-7", many) == "unknown option 'optoin-7': did you mean 'option-7'?"
    )
    assert unknown("option", "zzz", many).endswith("option-38, option-39")
    assert unknown("method", "ogd", ["ewc", "ogd2"]) == (
        "unknown method 'ogd': did you mean 'ogd2'? There are ewc, ogd2"
    )
    assert unknown("method", "ogd", []) == "unknown method 'ogd'; there are none"


def test_a_wrong_value_has_its_suggestion_behind_the_accepted_ones():
    with pytest.raises(ConfigError, match=r"^keep must be a or b, not 'aa': did you mean 'a'\?$"):
        require(False, "keep", "aa", "a or b", ("a", "b"))


def test_beginnings_are_whole_parts():
    assert list(beginnings(["a.b.c", "a.d"])) == ["a", "a.b", "a.b.c", "a.d"]


MODEL = torch.nn.Sequential()
MODEL.add_module("encoder", torch.nn.Linear(2, 3))
MODEL.add_module("head", torch.nn.Linear(3, 2))
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: Guard(MODEL, OPTIMIZER, "pca-ogd"), "PCAOGD()"),
        (lambda: Guard(MODEL, OPTIMIZER, params="encodr"), "encoder"),
        (lambda: Guard(MODEL, OPTIMIZER, exclude="haed"), "head"),
        (lambda: Guard(MODEL, OPTIMIZER, storage="facotred"), "factored"),
        (lambda: Guard(MODEL, OPTIMIZER, output="clas"), "class"),
        (lambda: Training(optimizer="adma"), "adam"),
        (lambda: Training(schedule="cosin"), "cosine"),
        (lambda: forgetless.scenario("rotated-mnits"), "rotated-mnist"),
        (lambda: forgetless.scenario("rotated-digits", task=3), "tasks"),
        (lambda: forgetless.fit(forgetless.scenario("split-digits"), "ewc"), "EWC()"),
        (lambda: forgetless.tangent_features(MODEL, torch.ones(1, 2), params="heda"), "head"),
        (lambda: plots.overlap_maps({}, statistic="larges"), "largest"),
        (lambda: forgetless.Gard, "Guard"),
    ],
)
def test_python_suggests_names_as_the_command_does(call, meant):
    with pytest.raises((ConfigError, AttributeError)) as error:
        call()
    assert f": did you mean {meant!r}?" in str(error.value)
