"""Final accuracy against memory size, OGD and PCA-OGD: the "twice as memory efficient" figure."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from forgetless.paper.artefact import Artefact, Data
from forgetless.paper.numbers import (
    DIVERGED,
    accuracies,
    average,
    cell,
    mean,
    picked,
    shown,
    std,
    table,
)
from forgetless.paper.pictures import COLOURS, LABELS, NAMES, Pictures, panels
from forgetless.paper.run import Run
from forgetless.paper.scale import Scale
from forgetless.paper.store import Results
from forgetless.paper.work import Workshop

BENCHMARKS = ("rotated", "cifar", "permuted")
METHODS = ("ogd", "pca-ogd")


def sweep_run(scale: Scale, benchmark: str, method: str, memory: int) -> Run:
    """One run of the sweep, released protocol.

    Dense rows are kept in bfloat16, but for those of Table 1's own runs.
    """
    settings: dict[str, Any] = {"memory": memory}
    if memory != scale.memory and method not in scale.benchmarks[benchmark].storage:
        settings["storage"] = "bfloat16"
    return Run(scale.config(benchmark, method, **settings))


def _cells(scale: Scale) -> dict[str, tuple[str, str, int]]:
    """Benchmark, method and memory of every run, by the name of its part."""
    return {f"{b}/{m}/{d}": (b, m, d) for b in BENCHMARKS for m in METHODS for d in scale.memories}


def parts(scale: Scale, results: Results) -> dict[str, list[Run]]:
    """Every method with every memory on the three benchmarks."""
    return {part: [sweep_run(scale, *cell)] for part, cell in _cells(scale).items()}


def measure(workshop: Workshop) -> dict[str, Any]:
    """Accuracies of every run: benchmark → method → memory."""
    data: dict[str, Any] = {}
    cells = _cells(workshop.scale)
    for part in workshop.measurable(cells):
        benchmark, method, memory = cells[part]
        run = sweep_run(workshop.scale, benchmark, method, memory)
        of = data.setdefault(benchmark, {}).setdefault(method, {})
        of[str(memory)] = _kept(workshop, run)
    return data


def _kept(workshop: Workshop, run: Run) -> dict[str, Any]:
    return picked(accuracies(workshop.trace(run)), "average", "forgetting", "final", "seconds")


def show(data: Data, pictures: Pictures) -> list[str]:
    """A_T for every memory, and the figure."""
    sweeps = [
        (f"{NAMES[b]}, {LABELS[m]}", sizes) for b, of in data.items() for m, sizes in of.items()
    ]
    memories = sorted({d for _, sizes in sweeps for d in sizes}, key=int)

    def rows(what: Callable[[Data], str]) -> list[list[str]]:
        return [[name, *(cell(sizes.get(d), what) for d in memories)] for name, sizes in sweeps]

    first = rows(lambda of: shown(np.transpose(of["final"])[0]))
    return [
        *table(["A_T, memory per task", *memories], rows(average)),
        pictures.add("memory", "Average accuracy against memory", lambda: _figure(data)),
        "",
        "*A_T against the directions or samples kept of each task, ± one standard deviation. Table "
        "1's memory is kept as there; of the others, dense rows are kept in bfloat16.*",
        "",
        "On the first task alone:",
        "",
        *table(["final accuracy on task 1", *memories], first),
    ]


def _figure(data: Data) -> Figure:
    figure, axes = panels(list(data))
    for panel, methods in zip(axes, data.values(), strict=True):
        for method, sizes in methods.items():
            memories = sorted(int(d) for d, of in sizes.items() if DIVERGED not in of)
            found = [sizes[str(d)]["average"] for d in memories]
            centre, spread = list(map(mean, found)), list(map(std, found))
            panel.errorbar(
                memories, centre, spread, color=COLOURS[method], marker="o", ms=4, capsize=2,
                label=LABELS[method],
            )  # fmt: skip
        panel.set_xscale("log", base=2)
        ticks = sorted({int(d) for sizes in methods.values() for d in sizes})
        panel.set_xticks(ticks, list(map(str, ticks)))
        panel.set_xlabel("memory per task")
    axes[0].set_ylabel("$A_T$, %")
    axes[0].legend(loc="best")
    return figure


ARTEFACT = Artefact(
    "memory",
    "Accuracy against memory",
    'section 5.2, and appendix "Comparison PCA-OGD versus OGD"',
    measure,
    show,
    parts,
)
