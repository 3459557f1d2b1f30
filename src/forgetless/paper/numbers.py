"""Means and spreads of seeds, tables in Markdown, and the rules by which numbers agree."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from forgetless.trace import Trace, metrics

DIVERGED = "diverged"  # key in the trace and in the data of a run that diverged
UNMEASURED = "–"  # in a table


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
        "average": metrics.average_accuracy(a),
        "forgetting": metrics.forgetting(a),
        "final": a[:, -1],
        "learned": np.diagonal(a, axis1=1, axis2=2),
        "best": np.stack([a[:, s:, s].max(1) for s in range(tasks)], 1),
        "seconds": trace.timings["total"],
        "device": trace.versions["device"],
    }


def picked(result: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Some of a run's `accuracies`, or that it diverged."""
    return {name: result[name] for name in (*names, DIVERGED) if name in result}


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


def ahead(one: Any, other: Any) -> tuple[float, float]:
    """The mean difference over seeds, and two standard errors of it.

    Paired by seed: the same seed has the same initial weights and the same batches.
    """
    differences = np.asarray(one, float) - np.asarray(other, float)
    return mean(differences), 2 * standard_error(differences)


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
