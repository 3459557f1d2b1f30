"""Final accuracy against memory size, OGD and PCA-OGD: the "twice as memory efficient" figure."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from forgetless.methods import method_label
from forgetless.paper.benchmarks import NAMES, Run, Scale
from forgetless.paper.numbers import DIVERGED, accuracies, average, cell, picked, shown, table
from forgetless.paper.pictures import Pictures, panels
from forgetless.paper.results import Data, Results
from forgetless.paper.workshop import Artefact, Workshop, each
from forgetless.report.looks import method_colour
from forgetless.support.statistics import mean, std

BENCHMARKS = ("rotated", "cifar", "permuted")
METHODS = ("ogd", "pca-ogd")


def sweep_run(scale: Scale, benchmark: str, method: str, memory: int) -> Run:
    """One run of the sweep, released protocol.

    Dense rows are stored in bfloat16, except those of Table 1's own runs.
    """
    settings: dict[str, Any] = {"memory": memory}
    if memory != scale.memory and method not in scale.benchmarks[benchmark].storage:
        settings["storage"] = "bfloat16"
    return Run(scale.config(benchmark, method, **settings))


def cells(scale: Scale, results: Results) -> dict[str, Run]:
    """Every method with every memory, as "benchmark/method/memory"."""
    return {
        f"{b}/{m}/{d}": sweep_run(scale, b, m, d)
        for b in BENCHMARKS
        for m in METHODS
        for d in scale.memories
    }


def measure(workshop: Workshop, run: Run) -> dict[str, Any]:
    """Accuracies of a run."""
    return picked(accuracies(workshop.trace(run)), "average", "forgetting", "final", "seconds")


def show(data: Data, pictures: Pictures) -> list[str]:
    """A_T for every memory, and the figure."""
    sweeps = [
        (f"{NAMES[b]}, {method_label(m)}", sizes)
        for b, methods in data.items()
        for m, sizes in methods.items()
    ]
    memories = sorted({d for _, sizes in sweeps for d in sizes}, key=int)

    def rows(what: Callable[[Data], str]) -> list[list[str]]:
        return [[name, *(cell(sizes.get(d), what) for d in memories)] for name, sizes in sweeps]

    first = rows(lambda result: shown(np.transpose(result["final"])[0]))
    return [
        *table(["A_T, memory per task", *memories], rows(average)),
        pictures.add("memory", "Average accuracy against memory", lambda: _figure(data)),
        "",
        "*A_T against the directions or samples stored of each task, ± one standard deviation. "
        "Dense rows are in bfloat16, except with Table 1's memory.*",
        "",
        "On the first task alone:",
        "",
        *table(["final accuracy on task 1", *memories], first),
    ]


def _figure(data: Data) -> Figure:
    figure, axes = panels(list(data))
    for panel, methods in zip(axes, data.values(), strict=True):
        for method, sizes in methods.items():
            memories = sorted(int(d) for d, result in sizes.items() if DIVERGED not in result)
            found = [sizes[str(d)]["average"] for d in memories]
            centre, spread = list(map(mean, found)), list(map(std, found))
            panel.errorbar(
                memories, centre, spread, color=method_colour(method), marker="o", ms=4, capsize=2,
                label=method_label(method),
            )  # fmt: skip
        panel.set_xscale("log", base=2)
        ticks = sorted({int(d) for sizes in methods.values() for d in sizes})
        panel.set_xticks(ticks, list(map(str, ticks)))
        panel.set_xlabel("memory per task")
    axes[0].set_ylabel("$A_T$, %")
    axes[0].legend(loc="best")
    return figure


MEMORY = Artefact(
    "memory",
    "Accuracy against memory",
    'section 5.2, and appendix "Comparison PCA-OGD versus OGD"',
    each(measure),
    show,
    cells,
)
