"""Means and spreads of seeds, tables in Markdown, and the rules by which numbers agree."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from forgetless.trace import Trace, metrics

DIVERGED = "diverged"  # noted in the trace of a run that broke down, and all that is said of it
UNMEASURED = "–"  # in a table


def diverged(trace: Trace) -> bool:
    """Whether training broke down, as it would again."""
    return bool(trace.config.get(DIVERGED))


def accuracies(trace: Trace) -> dict[str, Any]:
    """What the tables need of a run's accuracy matrix, seed by seed.

    average and forgetting (S,), final, learned and best (S, T): accuracy on each task at the end,
    right after learning it, and the best from then on. seconds is how long it took, on device.
    """
    a = trace.accuracy
    if diverged(trace):
        return {DIVERGED: True}
    tasks = a.shape[-1]
    return {
        "average": metrics.average_accuracy(a),
        "forgetting": metrics.forgetting(a),
        "final": a[:, -1],
        "learned": np.diagonal(a, axis1=1, axis2=2),
        "best": np.stack([a[:, s:, s].max(1) for s in range(tasks)], 1),
        "seconds": trace.timings["total"],
        "device": trace.versions["device"],
    }


def picked(of: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Some of a run's `accuracies`; of one that diverged, that it did."""
    return {name: of[name] for name in (*names, DIVERGED) if name in of}


def mean(values: Any) -> float:
    """Mean over seeds."""
    return float(np.mean(np.asarray(values, float)))


def std(values: Any) -> float:
    """Standard deviation over seeds, dividing by their number as the paper's code does."""
    return float(np.std(np.asarray(values, float)))


def standard_error(values: Any) -> float:
    """Of the mean over seeds, s / √n with s² = Σ (x − x̄)² / (n − 1); infinite for one seed."""
    found = np.asarray(values, float)
    return float(np.std(found, ddof=1)) / len(found) ** 0.5 if len(found) > 1 else inf


def ahead(one: Any, other: Any) -> tuple[float, float]:
    """By how much one mean over seeds is higher than another, and two standard errors of that.

    Seed by seed: the same seed has the same initial weights and the same batches.
    """
    differences = np.asarray(one, float) - np.asarray(other, float)
    return mean(differences), 2 * standard_error(differences)


def shown(values: Any, digits: int = 1) -> str:
    """Mean ± standard deviation."""
    return f"{mean(values):.{digits}f} ± {std(values):.{digits}f}"


def average(of: Mapping[str, Any]) -> str:
    """A_T of a run."""
    return shown(of["average"])


def both(of: Mapping[str, Any]) -> str:
    """A_T and F_T of a run."""
    return f"{average(of)} / {shown(of['forgetting'])}"


def cell(of: Mapping[str, Any] | None, show: Callable[[Mapping[str, Any]], str] = both) -> str:
    """A run in a table: what is to be shown of it, – if it was not measured, or that it diverged.

    Arguments:
        of: what was measured of it, None for nothing.
        show: of what was measured, that which is shown.
    """
    if of is None:
        return UNMEASURED
    return DIVERGED if DIVERGED in of else show(of)


def same_device(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether seconds of two runs compare; of older results the device is not known."""
    return one.get("device") is not None and one["device"] == other.get("device")


def allowance(least: float, printed_std: float, ours: float) -> float:
    """max(least, 2σ), σ the two standard deviations combined."""
    return max(least, 2 * float(np.hypot(printed_std, ours)))


def listed(values: Iterable[Any], form: str = "") -> str:
    """Values one after another: "25, 50"."""
    return ", ".join(format(value, form) for value in values)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown; all columns but the first are numbers."""
    marks = ["---", *["--:"] * (len(headings) - 1)]
    lines = [headings, marks, *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return ["| " + " | ".join(line) + " |" for line in cells] + [""]
