"""Runs as numbers, tables in Markdown, and the rules by which numbers agree."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from math import nan
from typing import Any

import numpy as np
from scipy.stats import binom, rankdata

from forgetless.support.statistics import DOUBT, MeanEstimate, mean, std
from forgetless.trace import Trace, average_accuracy, forgetting

DIVERGED = "diverged"  # key in the trace and in the data of a run that diverged
UNMEASURED = "–"  # in a table
_EXACT = 8  # points, the most of which all orders are tried
_ORDERS = 20_000  # drawn where there are more


def diverged(trace: Trace) -> bool:
    """Whether the run's training diverged."""
    return bool(trace.outcome.get(DIVERGED))


def accuracies(trace: Trace) -> dict[str, Any]:
    """The numbers that the tables need of a run, seed by seed.

    average and forgetting (S,); final, learned and best (S, T): accuracy on each task at the end,
    right after learning it, and the best from then on; and the seconds it took, on which device.
    """
    a = trace.accuracy
    if diverged(trace):
        return {DIVERGED: True}
    tasks = a.shape[-1]
    return {
        "average": average_accuracy(a),
        "forgetting": forgetting(a),
        "final": a[:, -1],
        "learned": np.diagonal(a, axis1=1, axis2=2),
        "best": np.stack([a[:, s:, s].max(1) for s in range(tasks)], 1),
        "seconds": trace.timings["total"],
        "device": trace.versions["device"],
    }


def picked(result: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Some of a run's `accuracies`, or that it diverged."""
    return {name: result[name] for name in (*names, DIVERGED) if name in result}


def estimate_printed(value: float, spread: float, seeds: int = 5) -> MeanEstimate:
    """A printed mean; its standard deviation divides by n, so the standard error is σ / √(n−1)."""
    return MeanEstimate(value, spread / (seeds - 1) ** 0.5, seeds - 1)


def by_chance(off: int, total: int) -> float:
    """The probability that so many or more of `total` true 95 % intervals miss."""
    return float(binom.sf(off - 1, total, DOUBT))


def rank_correlation(one: Any, other: Any) -> tuple[float, float]:
    """Spearman's correlation, and the two-sided p-value of a permutation test.

    Exact for up to eight points; for more, of 20,000 orders drawn with a fixed seed. Both NaN if
    one side does not vary.
    """
    x, y = (ranks - ranks.mean() for ranks in (rankdata(one), rankdata(other)))
    if not (x.any() and y.any()):
        return nan, nan
    exact = len(x) <= _EXACT
    if exact:
        orders = np.array(list(permutations(x)))
    else:
        orders = np.random.default_rng(0).permuted(np.tile(x, (_ORDERS, 1)), axis=1)
    values = np.append(orders @ y, [] if exact else x @ y) / np.sqrt((x @ x) * (y @ y))
    value = float(x @ y / np.sqrt((x @ x) * (y @ y)))
    return value, float(np.mean(np.abs(values) >= abs(value) - 1e-9))


def shown(values: Any, digits: int = 1) -> str:
    """Mean ± standard deviation."""
    return f"{mean(values):.{digits}f} ± {std(values):.{digits}f}"


def average(result: Mapping[str, Any]) -> str:
    """A_T of a run."""
    return shown(result["average"])


def both(result: Mapping[str, Any]) -> str:
    """A_T and F_T of a run."""
    return f"{average(result)} / {shown(result['forgetting'])}"


def cell(result: Mapping[str, Any] | None, show: Callable[[Mapping[str, Any]], str] = both) -> str:
    """A run's cell in a table: its numbers, "diverged", or – if it was not measured.

    Arguments:
        result: the data of the run, or None.
        show: the numbers as text.
    """
    if result is None:
        return UNMEASURED
    return DIVERGED if DIVERGED in result else show(result)


def same_device(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two runs ran on one device; older results do not say on which."""
    return one.get("device") is not None and one["device"] == other.get("device")


def allowance(least: float, printed_std: float, ours: float) -> float:
    """max(least, 2σ), where σ² is the sum of both variances."""
    return max(least, 2 * float(np.hypot(printed_std, ours)))


def listed(values: Iterable[Any], form: str = "") -> str:
    """Values separated by commas: "25, 50"."""
    return ", ".join(format(value, form) for value in values)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown; all columns but the first are numbers."""
    marks = ["---", *["--:"] * (len(headings) - 1)]
    lines = [headings, marks, *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return ["| " + " | ".join(line) + " |" for line in cells] + [""]
