"""Methods that the paper's Table 1 leaves out: GEM-NT and joint training, and GEM."""

from collections.abc import Sequence
from typing import Any

from forgetless.paper.artefact import Artefact, Data
from forgetless.paper.artefacts.table1 import cell_run
from forgetless.paper.numbers import accuracies, cell, table
from forgetless.paper.pictures import LABELS, NAMES, Pictures
from forgetless.paper.run import Run
from forgetless.paper.scale import Scale
from forgetless.paper.store import Results
from forgetless.paper.work import Workshop


def _artefact(name: str, title: str, methods: Sequence[str], note: str) -> Artefact:
    """A table with one row a benchmark and one column for each of the methods."""

    def cells(scale: Scale) -> dict[str, tuple[str, str]]:
        return {f"{b}/{m}": (b, m) for b in scale.benchmarks for m in methods}

    def parts(scale: Scale, results: Results) -> dict[str, list[Run]]:
        return {part: [cell_run(scale, *names)] for part, names in cells(scale).items()}

    def measure(workshop: Workshop) -> dict[str, Any]:
        data: dict[str, Any] = {}
        every = cells(workshop.scale)
        for part in workshop.measurable(every):
            benchmark, method = every[part]
            trace = workshop.trace(cell_run(workshop.scale, benchmark, method))
            data.setdefault(benchmark, {})[method] = accuracies(trace)
        return data

    def show(data: Data, pictures: Pictures) -> list[str]:
        rows = [[NAMES[b], *(cell(of.get(m)) for m in methods)] for b, of in data.items()]
        return [*table(["A_T / F_T", *(LABELS[m] for m in methods)], rows), note, ""]

    place = 'section 5.3 ("We run AGEM instead of GEM-NT")'
    return Artefact(name, title, place, measure, show, parts)


ARTEFACT = _artefact(
    "more-methods",
    "What Table 1 leaves out",
    ("gem-nt", "joint"),
    "Settings and networks as released. GEM-NT as the text has it (orthogonal to every task's loss "
    "gradient). Joint training keeps all data and follows the mean loss of all tasks so far, in as "
    "many steps as the others: an upper reference only where these are enough to learn all "
    "tasks at once.",
)
# By itself: its quadratic programme at every step makes it by far the slowest.
GEM = _artefact(
    "gem",
    "GEM",
    ("gem",),
    "GEM with margin 0, networks as released. What the released code calls GEM-NT is GEM with "
    "margin 0.5.",
)
