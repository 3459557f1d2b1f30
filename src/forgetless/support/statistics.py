"""Means over seeds: their intervals, and tests of whether two of them differ."""

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit  # scipy.stats, which wraps them, is slow to import

from forgetless.support.validation import Accepted

Test = Literal["t", "permutation"]
TESTS = Accepted(lambda value: value in ("t", "permutation"), "t or permutation")
DOUBT = 0.05  # of a test: the chance of rejecting what is true
_EXACT = 14  # differences, the most of which all signs are tried
_FLIPS = 20_000  # drawn where there are more

# From degrees of freedom to the number of standard errors that count as noise.
Margin = Callable[[float], float]


def mean(values: Any) -> float:
    """Mean over seeds."""
    return float(np.mean(np.asarray(values, float)))


def std(values: Any) -> float:
    """Population standard deviation over seeds, as in the paper's code."""
    return float(np.std(np.asarray(values, float)))


def standard_error(values: Any) -> float:
    """Standard error of the mean, s / √n with s² = Σ (x − x̄)² / (n − 1); ∞ for one seed."""
    found = np.asarray(values, float)
    return float(np.std(found, ddof=1)) / len(found) ** 0.5 if len(found) > 1 else inf


def student(freedom: float) -> float:
    """Half a 95 % interval in standard errors, by Student's t; ∞ without degrees of freedom."""
    return float(stdtrit(freedom, 1 - DOUBT / 2)) if freedom > 0 else inf


def two(freedom: float) -> float:
    """Two standard errors, however few seeds there are: with five, 88 %, not 95 %."""
    return 2.0


def none(freedom: float) -> float:
    """No noise: means alone are compared."""
    return 0.0


def ahead(one: Any, other: Any = 0.0, margin: Margin = student) -> tuple[float, float]:
    """The mean difference over seeds, and half its 95 % interval.

    Paired by seed: the same seed has the same initial weights and the same batches.
    """
    differences = np.asarray(one, float) - np.asarray(other, float)
    width = margin(len(differences) - 1)
    return mean(differences), width * standard_error(differences) if width else 0.0


class MeanEstimate(NamedTuple):
    """A mean over seeds, its standard error and its degrees of freedom."""

    mean: float
    error: float
    freedom: float


def estimate(values: Any) -> MeanEstimate:
    """The mean over seeds."""
    return MeanEstimate(mean(values), standard_error(values), len(values) - 1)


def apart(one: MeanEstimate, other: MeanEstimate, margin: Margin = student) -> tuple[float, float]:
    """The difference of two independent means, and half its 95 % interval (Welch)."""
    squares = np.square([one.error, other.error])
    if inf in squares:
        return one.mean - other.mean, inf if margin(1) else 0.0
    parts = (squares**2 / np.array([one.freedom, other.freedom])).sum()
    freedom = float(squares.sum() ** 2 / parts) if parts else inf
    return one.mean - other.mean, margin(freedom) * float(squares.sum()) ** 0.5


def paired_p(one: Any, other: Any, test: Test = "t") -> float:
    """The two-sided p-value of "these two have the same mean", paired by seed.

    NaN for fewer than two seeds, and 1 where no seed differs.

    Arguments:
        one, other: (S,) each, in the order of the same seeds.
        test: "t" is the paired t-test; "permutation" flips the signs of the differences, all 2^S
            ways for up to 14 seeds (so that p is at least 2 / 2^S), else 20,000 with a fixed seed.
    """
    differences = np.asarray(one, float) - np.asarray(other, float)
    if len(differences) < 2:
        return nan
    if not differences.any():
        return 1.0
    if test == "permutation":
        return _sign_flips(differences)
    error = standard_error(differences)
    size = abs(mean(differences)) / error if error else inf
    return float(2 * stdtr(len(differences) - 1, -size))


def _sign_flips(differences: Any) -> float:
    """The share of sign patterns whose sum is at least as far from zero."""
    count = len(differences)
    exact = count <= _EXACT
    if exact:
        numbers = np.arange(2**count)[:, None]
        signs = 1 - 2 * (numbers >> np.arange(count) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], (_FLIPS, count))
        signs = np.concatenate([np.ones((1, count)), signs])  # the observed one counts
    sums = np.abs(signs @ differences)
    observed = abs(differences.sum())
    return float(np.mean(sums >= observed * (1 - 1e-9)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, for several tests at once: p_(i) ← max_{j≤i} (m − j + 1) p_(j).

    NaN stays NaN and does not count.
    """
    found = np.asarray(p_values, float)
    order = [n for n in np.argsort(found) if np.isfinite(found[n])]
    highest = 0.0
    for place, n in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - place) * found[n]))
        found[n] = highest
    return [float(p) for p in found]
