"""Table 1: average accuracy and forgetting of five methods on four benchmarks, as released."""

from collections.abc import Iterator
from math import isnan, nan
from typing import Any

from forgetless.paper.artefact import Artefact, Data
from forgetless.paper.numbers import DIVERGED, accuracies, allowance, cell, mean, shown, std, table
from forgetless.paper.pictures import LABELS, NAMES, Pictures
from forgetless.paper.printed import TABLE1, Cell
from forgetless.paper.run import Run
from forgetless.paper.scale import METHODS, Scale
from forgetless.paper.store import Results
from forgetless.paper.work import Workshop
from forgetless.trace import Trace

LEAST = 1.5  # points of A_T or F_T that are never counted as a disagreement


def cell_run(scale: Scale, benchmark: str, method: str) -> Run:
    """The run of one cell, released protocol."""
    return Run(scale.config(benchmark, method))


def parts(scale: Scale, results: Results) -> dict[str, list[Run]]:
    """All twenty cells, as "benchmark method"."""
    return {f"{b} {m}": [cell_run(scale, b, m)] for m in METHODS for b in scale.benchmarks}


def traces(workshop: Workshop) -> Iterator[tuple[str, str, Trace]]:
    """Benchmark, method and trace of every cell whose run is there."""
    for benchmark in workshop.scale.benchmarks:
        for method in METHODS:
            if workshop.measurable([f"{benchmark} {method}"]):
                yield benchmark, method, workshop.trace(cell_run(workshop.scale, benchmark, method))


def measure(workshop: Workshop) -> dict[str, Any]:
    """A_T and F_T of every cell, seed by seed."""
    data: dict[str, Any] = {}
    for benchmark, method, trace in traces(workshop):
        data.setdefault(benchmark, {})[method] = accuracies(trace)
    return data


def agreement(printed: Cell, of: Data, what: str = "average") -> tuple[bool, float, float]:
    """Whether A_T ("forgetting": F_T) agrees, by how much it differs, and by how much it may.

    What diverged does not agree, by NaN.
    """
    if DIVERGED in of:
        return False, nan, nan
    value, spread = printed.accuracy, printed.accuracy_std
    if what == "forgetting":
        value, spread = printed.forgetting, printed.forgetting_std
    difference = mean(of[what]) - value
    allowed = allowance(LEAST, spread, std(of[what]))
    return abs(difference) <= allowed, difference, allowed


def show(data: Data, pictures: Pictures) -> list[str]:
    """One row a cell, the paper's number beside ours."""
    rows, agreed = [], {"average": 0, "forgetting": 0}
    for benchmark, methods in data.items():
        for method, of in methods.items():
            paper = TABLE1[benchmark][method]
            row = [f"{NAMES[benchmark]}, {LABELS[method]}"]
            for what, printed in (
                ("average", (paper.accuracy, paper.accuracy_std)),
                ("forgetting", (paper.forgetting, paper.forgetting_std)),
            ):
                agrees, difference, allowed = agreement(paper, of, what)
                agreed[what] += agrees
                text = DIVERGED if isnan(difference) else f"{difference:+.1f} ({allowed:.1f})"
                here = cell(of, lambda of, what=what: shown(of[what]))  # type: ignore[misc]
                row += ["{:.2f} ± {:.2f}".format(*printed), here]
                row += [text if agrees else f"**{text}**"]
            rows.append(row)
    by = "difference (allowed)"
    headings = ["", "A_T, paper", "A_T, here", by, "F_T, paper", "F_T, here", by]
    return [
        *table(headings, rows),
        f"A_T agrees in {agreed['average']} of {len(rows)} cells and F_T in "
        f"{agreed['forgetting']} (others bold): within max({LEAST}, 2σ) points of the printed one, "
        "σ both standard deviations combined.",
        "",
    ]


ARTEFACT = Artefact(
    "table1",
    "Table 1, released protocol",
    "section 5.3, Table 1",
    measure,
    show,
    parts,
)
