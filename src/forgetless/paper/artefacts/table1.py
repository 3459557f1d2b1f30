"""Table 1: average accuracy and forgetting of five methods on four benchmarks, as released."""

from collections.abc import Iterator
from typing import Any

from forgetless.paper.artefact import Artefact, Data
from forgetless.paper.numbers import accuracies, allowance, mean, shown, std, table
from forgetless.paper.pictures import LABELS, NAMES, Pictures
from forgetless.paper.printed import TABLE1, Cell
from forgetless.paper.run import Run
from forgetless.paper.scale import METHODS, Scale
from forgetless.paper.store import Results
from forgetless.paper.work import Workshop
from forgetless.trace import Trace

LEAST = 1.5  # points of A_T that are never counted as a disagreement


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


def agreement(cell: Cell, of: Data) -> tuple[bool, float, float]:
    """Whether A_T agrees, by how much it differs, and by how much it may."""
    difference = mean(of["average"]) - cell.accuracy
    allowed = allowance(LEAST, cell.accuracy_std, std(of["average"]))
    return abs(difference) <= allowed, difference, allowed


def show(data: Data, pictures: Pictures) -> list[str]:
    """One row a cell, the paper's number beside ours."""
    rows = []
    for benchmark, methods in data.items():
        for method, of in methods.items():
            cell = TABLE1[benchmark][method]
            agrees, difference, allowed = agreement(cell, of)
            rows.append(
                [
                    f"{NAMES[benchmark]}, {LABELS[method]}",
                    f"{cell.accuracy:.1f} ± {cell.accuracy_std:.1f}",
                    shown(of["average"]),
                    f"{difference:+.1f} ({allowed:.1f})",
                    "yes" if agrees else "**no**",
                    f"{cell.forgetting:.1f} ± {cell.forgetting_std:.1f}",
                    shown(of["forgetting"]),
                ]
            )
    agreed = sum(row[4] == "yes" for row in rows)
    headings = ["", "A_T, paper", "A_T, here", "difference (allowed)", "agrees"]
    return [
        *table([*headings, "F_T, paper", "F_T, here"], rows),
        f"{agreed} of {len(rows)} cells agree: A_T within max({LEAST}, 2σ) points of the printed "
        "one, σ both standard deviations combined.",
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
