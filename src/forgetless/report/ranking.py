"""Entries of a comparison against each other: intervals over seeds, and paired tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite, nan
from typing import final

import numpy as np
from numpy.typing import NDArray

from forgetless.report.comparison import Comparison, Entry, compare
from forgetless.support.statistics import TESTS, Test, ahead, holm, paired_p
from forgetless.support.validation import ConfigError, require
from forgetless.trace import (
    Metric,
    Trace,
    average_accuracy,
    backward_transfer,
    forgetting,
)

METRICS: dict[str, Metric] = {
    "average_accuracy": average_accuracy,
    "forgetting": forgetting,
    "backward_transfer": backward_transfer,
}
Array = NDArray[np.float64]


@final
@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half its 95 % interval by Student's t; ∞ for one seed."""

    mean: float
    half: float

    @property
    def text(self) -> str:
        """Such as "88.42 ± 0.51"."""
        return f"{self.mean:.2f}" + (f" ± {self.half:.2f}" if isfinite(self.half) else "")


@final
@dataclass(frozen=True)
class Place:
    """An entry among the others.

    Attributes:
        entry: the method with its settings.
        intervals: of each of `METRICS`; None if no seed has one.
        difference: of A_T from that of the reference, over the seeds that both have; None for the
            reference itself.
        p: of the test that it is the reference's, corrected for all tests; NaN for fewer than two
            seeds.
    """

    entry: Entry
    intervals: dict[str, Interval | None]
    difference: Interval | None
    p: float

    @property
    def seconds(self) -> float:
        """The time of all seeds."""
        return self.entry.trace.timings.get("total", 0.0)


@final
@dataclass(frozen=True)
class Ranking:
    """The entries of a comparison, each against a reference.

    Attributes:
        comparison: theirs.
        places: in its order.
        reference: the entry that others are compared with.
        is_best: whether that is the one with the highest A_T, and not a chosen one.
        test: the test.
        tests: how many there are, for which p is corrected.
    """

    comparison: Comparison
    places: tuple[Place, ...]
    reference: Entry
    is_best: bool
    test: Test
    tests: int

    @property
    def seeds(self) -> int:
        """The number of seeds of the reference that count."""
        return len(self.reference.counted)

    @property
    def is_tested(self) -> bool:
        """Whether there are differences to test, and seeds to test them with."""
        return any(isfinite(place.p) for place in self.places)

    @property
    def footnote(self) -> str:
        """What the columns are."""
        found = (
            f"A_T: mean {self.comparison.measure} on all tasks at the end, %. "
            "F_T: mean drop from the best, points."
        )
        if self.seeds > 1:
            found += (
                f" ±: half the 95 % interval of the mean of {self.seeds} seeds, by Student's t."
            )
        if self.is_tested:
            which = ", the best" if self.is_best else ""
            if self.is_best and any(place.entry.keeps_all_data for place in self.places):
                which += " that does not keep all data"
            name = {"t": "paired t-test", "permutation": "permutation test (signs of differences)"}
            found += (
                f" Δ: A_T less that of {self.reference.label}{which}, paired by seed. "
                f"p: {name[self.test]}"
            )
            found += f", Holm's correction for {self.tests} tests." if self.tests > 1 else "."
            least = 2 / 2**self.seeds
            if self.test == "permutation" and least > 0.01:
                found += f" With {self.seeds} seeds p is at least {least:.3g} before correction."
        return found


def ranking(
    runs: Sequence[Trace] | Comparison, *, against: str | None = None, test: Test = "t"
) -> Ranking:
    """The entries of a comparison with intervals, and tests of whether they differ.

    All pairs are tested and corrected together, since which entry is the best is only known
    afterwards; with a reference that is chosen, its pairs alone.

    Arguments:
        runs: traces of one scenario, or their comparison.
        against: the method or the label of the reference; by default the entry with the highest A_T
            that does not keep all data.
        test: "t", or "permutation", which needs six seeds to find any difference at 5 %.
    """
    TESTS.check("test", test)
    comparison = runs if isinstance(runs, Comparison) else compare(runs)[0]
    entries = comparison.entries
    reference = _best(entries) if against is None else _named(entries, against)
    pairs = [
        pair
        for pair in combinations(range(len(entries)), 2)
        if against is None or entries.index(reference) in pair
    ]
    tested = [paired_p(*_paired(entries[a], entries[b]), test) for a, b in pairs]
    if against is not None and pairs and not any(map(isfinite, tested)):
        raise ConfigError(f"a test against {reference.label} needs two seeds that both have")
    p_values = dict(zip(pairs, holm(tested)))
    at = entries.index(reference)
    places = []
    for n, entry in enumerate(entries):
        intervals = {name: _interval(entry, metric) for name, metric in METRICS.items()}
        p = p_values.get((min(n, at), max(n, at)), nan)
        places.append(Place(entry, intervals, _difference(entry, reference), p))
    count = sum(isfinite(p) for p in tested)
    return Ranking(comparison, tuple(places), reference, against is None, test, count)


def per_seed(entry: Entry, metric: Metric) -> dict[int, float]:
    """A metric of each seed that counts."""
    values = entry.trace.per_seed(metric)
    pairs = zip(entry.trace.seeds, values)
    return {seed: float(value) for seed, value in pairs if np.isfinite(value)}


def _paired(one: Entry, other: Entry) -> tuple[Array, Array]:
    """A_T of the seeds that both entries have."""
    here, there = per_seed(one, average_accuracy), per_seed(other, average_accuracy)
    both = [seed for seed in here if seed in there]
    return np.array([here[s] for s in both]), np.array([there[s] for s in both])


def _interval(entry: Entry, metric: Metric) -> Interval | None:
    values = [*per_seed(entry, metric).values()]
    return Interval(*ahead(values)) if values else None


def _difference(entry: Entry, reference: Entry) -> Interval | None:
    if entry is reference:
        return None
    here, there = _paired(entry, reference)
    return Interval(*ahead(here, there)) if len(here) else None


def _best(entries: Sequence[Entry]) -> Entry:
    fair = [entry for entry in entries if not entry.keeps_all_data] or entries

    def average(entry: Entry) -> float:
        return (entry.spread(average_accuracy) or (-np.inf,))[0]

    return max(fair, key=average)


def _named(entries: Sequence[Entry], name: str) -> Entry:
    found = [entry for entry in entries if name in (entry.label, entry.trace.method)]
    known = ", ".join(entry.label for entry in entries)
    require(len(found) == 1, "against", name, f"one of {known}")
    return found[0]
