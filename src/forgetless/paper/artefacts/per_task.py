"""The four tables of final accuracy, task by task, released protocol."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from forgetless.methods import method_label
from forgetless.paper.artefacts import table1
from forgetless.paper.benchmarks import NAMES, Run
from forgetless.paper.numbers import DIVERGED, allowance, diverged, estimate_printed, table
from forgetless.paper.pictures import Pictures, legend_below, panels
from forgetless.paper.printed import FINAL
from forgetless.paper.results import Data
from forgetless.paper.workshop import Artefact, Workshop, each
from forgetless.report.looks import method_colour
from forgetless.support.statistics import apart, estimate, mean, std

_LEAST = 2.5  # points of a task's accuracy that never counted as a disagreement by an earlier rule


def measure(workshop: Workshop, run: Run) -> Any:
    """Accuracy on every task at the end, (S, T)."""
    trace = workshop.trace(run)
    return {DIVERGED: True} if diverged(trace) else trace.accuracy[:, -1]


def finished(methods: Data) -> dict[str, Any]:
    """The methods of a benchmark that did not diverge."""
    return {m: final for m, final in methods.items() if not isinstance(final, Mapping)}


def agrees(printed: float, spread: float, seeds: Any) -> bool:
    """Whether 0 is in the 95 % interval of the difference of a task's mean accuracy."""
    difference, noise = apart(estimate(seeds), estimate_printed(printed, spread))
    return abs(difference) <= noise


def near(printed: float, spread: float, seeds: Any) -> bool:
    """An earlier rule: whether it is within max(2.5, 2σ) of the printed one."""
    return abs(mean(seeds) - printed) <= allowance(_LEAST, spread, std(seeds))


def differences(data: Data) -> list[float]:
    """How far every task's mean accuracy is from the printed one, in points."""
    return [
        abs(mean(seeds) - printed)
        for benchmark, methods in data.items()
        for method, final in finished(methods).items()
        for printed, seeds in zip(FINAL[benchmark][method][0], np.transpose(final), strict=False)
    ]


def agreeing(
    data: Data, rule: Callable[[float, float, Any], bool] = agrees
) -> dict[str, tuple[int, int]]:
    """For each benchmark how many printed cells agree, and how many there are.

    No cell of a method that diverged agrees.
    """
    counts = {}
    for benchmark, methods in data.items():
        there = finished(methods)
        within = [
            rule(printed, spread, seeds)
            for method, final in there.items()
            for printed, spread, seeds in zip(
                *FINAL[benchmark][method], np.transpose(final), strict=False
            )
        ]
        broken = sum(len(FINAL[benchmark][m][0]) for m in methods if m not in there)
        counts[benchmark] = sum(within), len(within) + broken
    return counts


def show(data: Data, pictures: Pictures) -> list[str]:
    """The number of cells that agree, and all of them as a figure."""
    counts = agreeing(data)
    counts["all"] = tuple(map(sum, zip(*counts.values(), strict=True)))  # type: ignore[assignment]
    rows = [
        [NAMES.get(benchmark, benchmark), f"{good} of {total}", f"{100 * good / total:.0f} %"]
        for benchmark, (good, total) in counts.items()
    ]
    broken = [
        f"{NAMES[b]} {method_label(m)}"
        for b, methods in data.items()
        for m in methods
        if m not in finished(methods)
    ]
    return [
        *table(["", "cells that agree", ""], rows),
        "A cell agrees if 0 is in the 95 % interval of the difference."
        + (f" None does of what diverged: {', '.join(broken)}." if broken else ""),
        "",
        pictures.add("per-task", "Final accuracy of every task, here and in the paper",
                     lambda: _figure(data)),
        "",
        "*Accuracy on each task at the end: lines here (band: ± one standard deviation), crosses "
        "as printed.*",
        "",
    ]  # fmt: skip


def _figure(data: Data) -> Figure:
    figure, axes = panels(list(data), width=2.6, height=2.8)
    for panel, (benchmark, methods) in zip(axes, data.items(), strict=True):
        for method, final in finished(methods).items():
            values = np.asarray(final, float)
            tasks = np.arange(1, values.shape[1] + 1)
            centre, spread = values.mean(0), values.std(0)
            colour = method_colour(method)
            panel.fill_between(
                tasks, centre - spread, centre + spread, color=colour, alpha=0.15, lw=0
            )
            panel.plot(tasks, centre, color=colour, label=method_label(method))
            printed = FINAL[benchmark][method][0][: len(tasks)]
            panel.plot(tasks[: len(printed)], printed, "x", color=colour, ms=4)
        panel.set_xlabel("task")
    axes[0].set_ylabel("final accuracy, %")
    legend_below(figure, axes[0], 5)
    return figure


PER_TASK = Artefact(
    "per-task",
    "Final accuracy, task by task",
    "appendix, tables of final accuracy",
    each(measure),
    show,
    table1.cells,
)
