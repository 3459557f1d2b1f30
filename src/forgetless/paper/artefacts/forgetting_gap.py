"""Why the printed F_T is larger than the measured one: an explanation, and why it fails."""

from collections.abc import Iterator
from math import isnan, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forgetless.methods import method_label
from forgetless.paper.artefacts import table1
from forgetless.paper.benchmarks import NAMES, Run
from forgetless.paper.numbers import DIVERGED, cell, diverged, mean, table
from forgetless.paper.pictures import Pictures
from forgetless.paper.printed import FINAL, TABLE1
from forgetless.paper.results import Data
from forgetless.paper.workshop import Artefact, Workshop, each
from forgetless.trace import metrics

_IMAGES = 256  # of a noisy evaluation: an unused setting of the released code
_DRAWS = 200


def measure(workshop: Workshop, run: Run) -> dict[str, Any]:
    """F_T as measured, as it would be with noisy evaluations, and the best accuracies."""
    trace = workshop.trace(run)
    if diverged(trace):
        return {DIVERGED: True}
    a = trace.accuracy
    return {
        "forgetting": metrics.forgetting(a),
        "noisy": _noisy(a),
        "best": np.mean([a[:, s:, s].max(1) for s in range(a.shape[1] - 1)]),
        "best ever": np.nanmax(a),
    }


def _cells(data: Data) -> Iterator[tuple[str, str, Data]]:
    """Benchmark, method and data of every cell that did not diverge."""
    for benchmark, methods in data.items():
        yield from (
            (benchmark, m, result) for m, result in methods.items() if DIVERGED not in result
        )


def _noisy(accuracy: NDArray[np.float64]) -> float:
    """F_T if each evaluation but the last used 256 random images, mean over draws."""
    rng = np.random.default_rng(0)
    share = np.nan_to_num(accuracy / 100)
    drawn = rng.binomial(_IMAGES, share, size=(_DRAWS, *accuracy.shape)) * (100 / _IMAGES)
    drawn = np.where(np.isnan(accuracy), np.nan, drawn)
    drawn[:, :, -1] = accuracy[:, -1]
    return float(metrics.forgetting(drawn).mean())


def implied_best(benchmark: str, method: str) -> float:
    """Mean best accuracy on all tasks but the last, implied by printed accuracies and F_T."""
    final = FINAL[benchmark][method][0]
    return TABLE1[benchmark][method].forgetting + float(np.mean(final[:-1]))


def excess(data: Data) -> list[tuple[str, str, float, float]]:
    """For every cell the implied best minus ours, and the F_T that noise would add."""
    return [
        (b, m, implied_best(b, m) - result["best"], result["noisy"] - mean(result["forgetting"]))
        for b, m, result in _cells(data)
    ]


def likeness(data: Data) -> float:
    """Correlation over the cells of the difference in the best with the F_T that noise adds.

    NaN for fewer than three cells.
    """
    gaps, noises = (np.array([cell[i] for cell in excess(data)]) for i in (2, 3))
    return float(np.corrcoef(gaps, noises)[0, 1]) if len(gaps) > 2 else nan


def out_of_reach(data: Data) -> list[tuple[str, str]]:
    """Cells whose printed F_T implies a mean best accuracy that no task ever had here."""
    return [
        (benchmark, method)
        for benchmark, method, result in _cells(data)
        if implied_best(benchmark, method) > result["best ever"]
    ]


def show(data: Data, pictures: Pictures) -> list[str]:
    """Printed, measured, with noise, and the best accuracies that the printed numbers imply."""
    rows = [
        [
            f"{NAMES[benchmark]}, {method_label(method)}",
            f"{TABLE1[benchmark][method].forgetting:.2f}",
            cell(result, lambda result: f"{mean(result['forgetting']):.2f}"),
            cell(result, lambda result: f"{result['noisy']:.2f}"),
            f"{implied_best(benchmark, method):.1f}",
            cell(result, lambda result: f"{result['best']:.1f}"),
            cell(result, lambda result: f"{result['best ever']:.1f}"),
        ]
        for benchmark, methods in data.items()
        for method, result in methods.items()
    ]
    headings = ["", "F_T, paper", "F_T, here", f"with {_IMAGES} images", "best, implied"]
    alike = likeness(data)
    over_cells = (
        " Over the cells, what that would add and what is to be explained correlate by "
        f"{alike:.2f}."
    )
    return [
        *table([*headings, "best, here", "best ever, any task"], rows),
        "*Best, implied*: the mean best accuracy on all tasks but the last that the printed F_T "
        f"and final accuracies require. *With {_IMAGES} images*: F_T if every evaluation but the "
        f"last had been on {_IMAGES} random images, the size of a validation set that the released "
        "code names and does not use; the best of noisy values is too high."
        + ("" if isnan(alike) else over_cells),
        "",
    ]


FORGETTING_GAP = Artefact(
    "forgetting-gap",
    "Where the difference in F_T comes from",
    "section 5.3, Table 1",
    each(measure),
    show,
    table1.cells,
)
