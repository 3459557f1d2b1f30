"""Table 1: average accuracy and forgetting of all methods on four benchmarks, as released."""

from collections.abc import Mapping, Sequence
from math import isnan, nan

from forgetless.methods import method_label
from forgetless.paper import printed
from forgetless.paper.benchmarks import NAMES, TABLE1_METHODS, Run, Scale
from forgetless.paper.numbers import (
    DIVERGED,
    accuracies,
    allowance,
    cell,
    estimate_printed,
    shown,
    table,
)
from forgetless.paper.pictures import Pictures
from forgetless.paper.results import Data, Results
from forgetless.paper.workshop import Artefact, each
from forgetless.support.statistics import apart, estimate, mean, std

_LEAST = 1.5  # points of A_T or F_T that never counted as a disagreement by an earlier rule


def cell_run(scale: Scale, benchmark: str, method: str) -> Run:
    """The run of one cell, released protocol."""
    return Run(scale.config(benchmark, method))


def cells(scale: Scale, results: Results) -> Mapping[str, Run]:
    """All twenty cells, as "benchmark/method"."""
    return _runs(scale, TABLE1_METHODS)


def _runs(scale: Scale, methods: Sequence[str]) -> dict[str, Run]:
    return {f"{b}/{m}": cell_run(scale, b, m) for b in scale.benchmarks for m in methods}


def agreement(
    paper_cell: printed.Cell, result: Data, what: str = "average"
) -> tuple[bool, float, float]:
    """Whether A_T ("forgetting": F_T) agrees, the difference, and half its 95 % interval.

    A run that diverged does not agree; its difference is NaN.
    """
    if DIVERGED in result:
        return False, nan, nan
    difference, noise = apart(estimate(result[what]), estimate_printed(*paper_cell.of(what)))
    return abs(difference) <= noise, difference, noise


def near(paper_cell: printed.Cell, result: Data, what: str = "average") -> bool:
    """An earlier rule: whether it is within max(1.5, 2σ) of the printed one."""
    if DIVERGED in result:
        return False
    value, spread = paper_cell.of(what)
    return abs(mean(result[what]) - value) <= allowance(_LEAST, spread, std(result[what]))


def show(data: Data, pictures: Pictures) -> list[str]:
    """One row per cell, with the paper's numbers and ours."""
    rows, agreed = [], {"average": 0, "forgetting": 0}
    for benchmark, methods in data.items():
        for method, result in methods.items():
            paper = printed.TABLE1[benchmark][method]
            row = [f"{NAMES[benchmark]}, {method_label(method)}"]
            for what in agreed:
                value, spread = paper.of(what)
                agrees, difference, noise = agreement(paper, result, what)
                agreed[what] += agrees
                text = DIVERGED if isnan(difference) else f"{difference:+.1f} ± {noise:.1f}"
                here = DIVERGED if isnan(difference) else shown(result[what])
                row += [f"{value:.2f} ± {spread:.2f}", here, text if agrees else f"**{text}**"]
            rows.append(row)
    headings = ["", "A_T, paper", "A_T, here", "difference", "F_T, paper", "F_T, here"]
    return [
        *table([*headings, "difference"], rows),
        f"A_T agrees in {agreed['average']} of {len(rows)} cells and F_T, as the text defines it, "
        f"in {agreed['forgetting']} (others bold): 0 is in the 95 % interval of the difference. "
        "What F_T is as printed is examined below.",
        "",
    ]


def _other_methods(name: str, title: str, methods: Sequence[str], note: str) -> Artefact:
    """A table with one row per benchmark and one column for each of the methods."""

    def show(data: Data, pictures: Pictures) -> list[str]:
        rows = [[NAMES[b], *(cell(result.get(m)) for m in methods)] for b, result in data.items()]
        return [*table(["A_T / F_T", *map(method_label, methods)], rows), note, ""]

    return Artefact(
        name,
        title,
        'section 5.3 ("We run AGEM instead of GEM-NT")',
        each(lambda workshop, run: accuracies(workshop.trace(run))),
        show,
        lambda scale, results: _runs(scale, methods),
    )


TABLE1 = Artefact(
    "table1",
    "Table 1, released protocol",
    "section 5.3, Table 1",
    each(lambda workshop, run: accuracies(workshop.trace(run))),
    show,
    cells,
)
MORE_METHODS = _other_methods(
    "more-methods",
    "What Table 1 leaves out",
    ("gem-nt", "joint"),
    "Settings and networks as released. GEM-NT as the text has it (orthogonal to every task's loss "
    "gradient). Joint training keeps all data and follows the mean loss of all tasks so far, in as "
    "many steps as the others: an upper reference only where these are enough to learn all "
    "tasks at once.",
)
# Apart from the others: its quadratic programme at every step makes it by far the slowest.
GEM = _other_methods(
    "gem",
    "GEM",
    ("gem",),
    "GEM with margin 0, networks as released. What the released code calls GEM-NT is GEM with "
    "margin 0.5.",
)
