"""Final accuracy against memory size, OGD and PCA-OGD: the "twice as memory efficient" figure."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from forgetless.paper.artefact import Artefact, Data
from forgetless.paper.numbers import accuracies, mean, shown, std, table
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


def parts(scale: Scale, results: Results) -> dict[str, list[Run]]:
    """Every method with every memory on the three benchmarks."""
    return {
        b: [sweep_run(scale, b, m, d) for m in METHODS for d in scale.memories] for b in BENCHMARKS
    }


def measure(workshop: Workshop) -> dict[str, Any]:
    """Accuracies of every run: benchmark → method → memory."""
    scale = workshop.scale
    return {
        b: {
            m: {str(d): _kept(workshop, sweep_run(scale, b, m, d)) for d in scale.memories}
            for m in METHODS
        }
        for b in workshop.measurable(BENCHMARKS)
    }


def _kept(workshop: Workshop, run: Run) -> dict[str, Any]:
    of = accuracies(workshop.trace(run))
    return {name: of[name] for name in ("average", "forgetting", "final", "seconds")}


def show(data: Data, pictures: Pictures) -> list[str]:
    """A_T for every memory, and the figure."""
    memories = list(next(iter(data.values()))["ogd"])
    rows = [
        [f"{NAMES[b]}, {LABELS[m]}", *(shown(of["average"]) for of in sizes.values())]
        for b, methods in data.items()
        for m, sizes in methods.items()
    ]
    first = [
        [
            f"{NAMES[b]}, {LABELS[m]}",
            *(shown(np.transpose(of["final"])[0]) for of in sizes.values()),
        ]
        for b, methods in data.items()
        for m, sizes in methods.items()
    ]
    return [
        *table(["A_T, memory per task", *memories], rows),
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
            memories = [int(d) for d in sizes]
            centre = [mean(of["average"]) for of in sizes.values()]
            spread = [std(of["average"]) for of in sizes.values()]
            panel.errorbar(
                memories, centre, spread, color=COLOURS[method], marker="o", ms=4, capsize=2,
                label=LABELS[method],
            )  # fmt: skip
        panel.set_xscale("log", base=2)
        panel.set_xticks(memories, [str(d) for d in memories])
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
