"""Methods that the paper's Table 1 leaves out: GEM-NT, GEM and joint training."""

from typing import Any

from forgetless.paper.artefact import Artefact, Data
from forgetless.paper.numbers import accuracies, shown, table
from forgetless.paper.pictures import LABELS, Pictures
from forgetless.paper.scale import Scale
from forgetless.paper.store import Results
from forgetless.paper.work import Run, Workshop

METHODS = ("gem-nt", "gem", "joint")


def cell_run(scale: Scale, benchmark: str, method: str) -> Run:
    """The run of one cell, on the network as the released code trains it."""
    return Run(scale.config(benchmark, method), method == "gem-nt" and benchmark != "split")


def runs(scale: Scale, results: Results) -> list[Run]:
    """All cells."""
    return [cell_run(scale, b, m) for m in METHODS for b in scale.benchmarks]


def measure(workshop: Workshop) -> dict[str, Any]:
    """A_T and F_T of every cell, seed by seed."""
    scale = workshop.scale
    return {
        b: {m: accuracies(workshop.trace(cell_run(scale, b, m))) for m in METHODS}
        for b in scale.benchmarks
    }


def show(data: Data, pictures: Pictures) -> list[str]:
    """One row a benchmark, A_T / F_T of each method."""
    rows = [
        [b, *(f"{shown(of['average'])} / {shown(of['forgetting'])}" for of in methods.values())]
        for b, methods in data.items()
    ]
    return [
        *table(["A_T / F_T", *(LABELS[m] for m in METHODS)], rows),
        "GEM-NT as the text has it (orthogonal to every task's loss gradient); joint training "
        "keeps all data and is the upper reference.",
        "",
    ]


ARTEFACT = Artefact(
    "more-methods",
    "What Table 1 leaves out",
    'section 5.3 ("We run AGEM instead of GEM-NT")',
    measure,
    show,
    runs,
)
