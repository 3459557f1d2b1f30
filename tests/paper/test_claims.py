"""Verdicts follow from the numbers: each test can come out every way."""

import pytest

from forgetless.paper.claims import ALL
from forgetless.paper.claims.base import FAILS, HOLDS, RELEASED_ONLY, UNDECIDED, judged
from forgetless.paper.printed import TABLE1


def verdict(words, *, lacks=(), **data):
    """The verdict on the one claim that says these words, from the data of artefacts."""
    claims = [c for group in ALL.values() for c in group if words in c.says]
    assert len(claims) == 1
    records = {
        name.replace("_", "-"): {"data": value, "lacks": list(lacks)}
        for name, value in data.items()
    }
    return judged(claims[0], records)[0]


def cells(**averages):
    return {
        method.replace("_", "-"): {"average": values, "forgetting": [1.0, 1.0]}
        for method, values in averages.items()
    }


@pytest.mark.parametrize(
    ("released", "corrected", "expected"),
    [
        ([90.0, 90.2], [90.0, 90.2], HOLDS),
        ([90.0, 90.2], [70.0, 70.2], RELEASED_ONLY),
        ([70.0, 70.2], [90.0, 90.2], FAILS),
        ([80.0, 80.4], [80.0, 80.4], UNDECIDED),
    ],
)
def test_the_best_method_must_be_ahead_by_more_than_the_spread(released, corrected, expected):
    data = {
        "rotated": {
            name: cells(a_gem=own, sgd=[79.9, 80.3], ogd=[60.0, 60.0])
            for name, own in (("released", released), ("corrected", corrected))
        }
    }
    assert verdict("A-GEM is the best on Rotated", protocols=data) == expected


@pytest.mark.parametrize(
    ("released", "frozen", "expected"),
    [(40.0, 40.0, HOLDS), (40.0, 70.0, RELEASED_ONLY), (70.0, 70.0, FAILS)],
)
def test_the_worst_method_must_be_so_under_every_protocol(released, frozen, expected):
    data = {
        "cifar": {
            name: cells(a_gem=[own], sgd=[50.0], pca_ogd=[72.0])
            for name, own in (("released", released), ("frozen", frozen))
        }
    }
    assert verdict("A-GEM is the worst", protocols=data) == expected


def table(shift, missing=0):
    """Table 1 so far from the printed one, and the cells that are not there."""
    names = [(b, m) for b, of in TABLE1.items() for m in of]
    data = {}
    for benchmark, method in names[missing:]:
        cell = TABLE1[benchmark][method]
        found = {"average": [cell.accuracy + shift], "forgetting": [cell.forgetting + shift]}
        data.setdefault(benchmark, {})[method] = found
    return data, [f"{b} {m}" for b, m in names[:missing]]


@pytest.mark.parametrize(
    ("shift", "missing", "expected"),
    [(1.4, 0, HOLDS), (20.0, 0, FAILS), (1.4, 1, UNDECIDED), (20.0, 5, UNDECIDED)],
)
def test_table_1_is_decided_by_all_its_cells(shift, missing, expected):
    data, lacks = table(shift, missing)
    assert verdict("A_T of 20 cells", table1=data, lacks=lacks) == expected


@pytest.mark.parametrize(("pca", "expected"), [(80.0, HOLDS), (79.0, HOLDS), (70.0, FAILS)])
def test_twice_as_efficient_means_as_good_with_half_the_memory(pca, expected):
    data = {
        "rotated": {
            "ogd": {"100": {"average": [70.0]}, "200": {"average": [80.0]}},
            "pca-ogd": {"100": {"average": [pca]}, "200": {"average": [90.0]}},
        }
    }
    assert verdict("twice as memory efficient", memory=data) == expected


@pytest.mark.parametrize(("several", "expected"), [(0.9, HOLDS), (1.5, FAILS)])
def test_a_bound_that_is_broken_once_does_not_hold(several, expected):
    data = {"bounds": {"SGD": {"one": 1.0, "several": several, "valid": 1.0}}}
    assert verdict("Δ of SGD ≤", theory=data) == expected
