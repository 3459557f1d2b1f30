"""The values that a search tries, and those beyond them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgetless import ConfigError
from forgetless.launch.search.space import Dimension, searchable, space_of
from forgetless.methods import METHODS, method_class
from forgetless.support.validation import FRACTION, SHARE, check_option, option, real, whole
from tests.launch.search.problems import dimension

SHARES = st.floats(0.01, 0.99).map(lambda x: round(x, 2))


@pytest.mark.parametrize(
    ("values", "accepted", "up", "expected"),
    [
        ((0.001, 0.003, 0.01), real(0), True, 0.03),
        ((0.003, 0.01, 0.03), real(0), True, 0.1),
        ((0.001, 0.003, 0.01), real(0), False, 0.0003),
        ((1, 10, 30, 100, 300), whole(1), True, 1000),
        ((1, 10), whole(1), False, None),
        ((25, 50, 100), whole(1), True, 200),
        ((0.9, 0.95, 0.98), SHARE, True, 0.99),
        ((0.9, 0.95, 0.98), SHARE, False, 0.8),
        ((0.8, 0.9), SHARE, False, 0.5),
        ((0.5, 0.8), SHARE, False, 0.3),
        ((0.2, 0.5), SHARE, True, 0.7),
        ((0.0, 0.5), FRACTION, False, None),
        ((0.5, 1.0), FRACTION, True, None),
        ((0.0, 1.0, 2.0), real(0), True, 5.0),
        ((0.0, 1.0), real(0), True, 2.0),
        ((0.0, 1.0), real(0), False, None),
    ],
)
def test_a_grid_continues_as_a_person_would(values, accepted, up, expected):
    assert dimension(values, accepted).beyond(values, up=up) == expected


@given(st.lists(SHARES, min_size=2, max_size=4, unique=True), st.booleans())
def test_what_lies_beyond_shares_is_a_share_further_out(values, up):
    found = dimension(tuple(values), SHARE).beyond(values, up=up)
    if found is not None:
        assert 0 < found < 1
        assert found > max(values) if up else found < min(values)


@given(st.lists(st.integers(1, 999), min_size=2, max_size=4, unique=True))
def test_counts_stay_counts(values):
    found = dimension(tuple(values), whole(1)).beyond(values, up=True)
    assert isinstance(found, int)
    assert found > max(values)


@pytest.mark.parametrize("name", METHODS)
def test_the_values_that_an_option_declares_are_accepted_and_in_order(name):
    for setting, field in searchable(method_class(name)).items():
        values = field.metadata["search"]
        for value in values:
            check_option(field, value, setting)
        assert list(values) == sorted(values)


def test_an_option_that_is_given_is_not_searched():
    ewc, kron = METHODS["ewc"], METHODS["kron-ogd"]
    assert [d.name for d in space_of(ewc, {})] == ["lr", "ewc_strength"]
    assert [d.name for d in space_of(ewc, {}, {"lr"})] == ["ewc_strength"]
    assert [d.name for d in space_of(kron, {}, {"drift"})] == ["lr"]  # energy takes its place
    assert space_of(ewc, {"lr": [0.1, 0.01]})[0].values == (0.01, 0.1)


def test_bad_grids_are_one_sentence():
    for values, words in (
        ((), "one or more values"),
        ((1.0, 1.0), "values that differ"),
        ((-1.0,), "a finite number of at least 0, not -1.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            Dimension("x", values, dimension((1.0,), real(0)).field)
    with pytest.raises(ConfigError, match="lr has a value and a grid"):
        space_of(METHODS["sgd"], {"lr": [0.1]}, {"lr"})
    with pytest.raises(ConfigError, match="unknown option of sgd 'speed'"):
        space_of(METHODS["sgd"], {"speed": [1]})


def test_texts_have_no_order():
    assert not dimension(("sgd", "adam"), None).is_ordered
    assert option(1.0, "x", search=(1.0,)).metadata["search"] == (1.0,)
