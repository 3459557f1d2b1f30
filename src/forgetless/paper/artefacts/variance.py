"""Explained variance of the tangent features, which depends on the moment of the measurement."""

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from forgetless.paper import printed
from forgetless.paper.artefacts.table1 import cell_run
from forgetless.paper.benchmarks import NAMES, Run, Scale
from forgetless.paper.numbers import table
from forgetless.paper.pictures import Pictures, legend_below, panels
from forgetless.paper.results import Data, Results
from forgetless.paper.workshop import Artefact, Cells, Probe, Workshop, each_probed
from forgetless.support.statistics import mean
from forgetless.theory import explained_variance

BENCHMARKS = ("permuted", "rotated", "cifar")
# Name → task (from 0), weights after which task (-1 for the initial ones), centred.
MOMENTS: dict[str, tuple[int, int, bool]] = {
    "task 1, at initialisation": (0, -1, False),
    "task 2, at initialisation": (1, -1, False),
    "task 1, after training on it": (0, 0, False),
    "task 1, after training on it, centred": (0, 0, True),
    "task 2, before training on it": (1, 0, False),
    "task 2, after training on it": (1, 1, False),
    "task 2, after training on it, centred": (1, 1, True),
}
ALLOWED = {"permuted": 2.0, "rotated": 2.0, "cifar": 4.0}  # points from a column of the paper's


def cells(scale: Scale, results: Results) -> dict[str, Run]:
    """PCA-OGD's own runs."""
    return {b: cell_run(scale, b, "pca-ogd") for b in BENCHMARKS}


def probe(workshop: Workshop, run: Run) -> dict[str, Any]:
    """Percent explained, (S, counts), by moment; and for few components."""
    scale = workshop.scale
    counts = [*scale.variance_counts, scale.few]
    keys = {run.key: benchmark for benchmark, run in cells(scale, {}).items()}
    samples = scale.benchmarks[keys[run.key]].variance_samples
    replay, present = workshop.replay(run), -1
    found = {}
    for name, (task, after, centred) in MOMENTS.items():
        if after != present:
            replay.at(after)
            present = after
        drawn = replay.samples(task, samples, "samples of the explained variance")
        grams = [phi.gram() for phi in replay.features(drawn)]
        shares = np.array([_percent(gram, counts, centred) for gram in grams])
        found[name] = {"percent": shares[:, :-1], "few": shares[:, -1]}
    return found


def _percent(gram: torch.Tensor, counts: list[int], centred: bool) -> list[float]:
    curve = 100 * explained_variance(gram, centred=centred)
    return [float(curve[min(count, len(curve)) - 1]) for count in counts]


_PROBE = Probe("variance", probe)


def measure(workshop: Workshop, cells: Cells) -> dict[str, Any]:
    """The counts, and benchmark → the probe's result."""
    counts = {"counts": list(workshop.scale.variance_counts), "few": workshop.scale.few}
    return counts | each_probed(_PROBE)(workshop, cells)


def benchmarks(data: Data) -> dict[str, Any]:
    """The data of the benchmarks alone."""
    return {b: data[b] for b in BENCHMARKS if b in data}


def show(data: Data, pictures: Pictures) -> list[str]:
    """Percent explained at every moment, with the paper's columns."""
    counts = [str(count) for count in data["counts"]]
    rows = []
    for benchmark, moments in benchmarks(data).items():
        rows.append(
            [f"**{NAMES[benchmark]}, paper**", *(f"{v:.1f}" for v in printed.VARIANCE[benchmark])]
        )
        for name, result in moments.items():
            mark = " ←" if fits(data, benchmark, name) else ""
            mark = " ⟸" if name == convention(data, benchmark) else mark
            rows.append([name + mark, *(f"{v:.1f}" for v in np.mean(result["percent"], 0))])
    return [
        *table(["percent of variance, components", *counts], rows),
        "⟸ the moment that the paper's column is nearest to; ← others that it agrees with, within "
        "2 points (Split CIFAR 4).",
        "",
        pictures.add("variance", "Explained variance by moment", lambda: _figure(data)),
        "",
        "*Explained variance against components. Crosses: the paper's table.*",
        "",
    ]


def _figure(data: Data) -> Figure:
    figure, axes = panels(list(benchmarks(data)))
    shown_moments = {
        "task 2, at initialisation": ("#999999", "-"),
        "task 1, after training on it": ("#0072B2", "-"),
        "task 2, before training on it": ("#E69F00", "--"),
        "task 2, after training on it": ("#D55E00", "-"),
    }
    for panel, benchmark in zip(axes, benchmarks(data), strict=True):
        for name, (colour, line) in shown_moments.items():
            values = np.mean(data[benchmark][name]["percent"], 0)
            panel.plot(data["counts"], values, line, color=colour, label=name)
        panel.plot(data["counts"], printed.VARIANCE[benchmark], "kx", label="paper")
        panel.set_xscale("log")
        panel.set_xlabel("components")
        panel.set_ylim(0, 102)
    axes[0].set_ylabel("variance explained, %")
    legend_below(figure, axes[0], 3)
    return figure


def furthest(data: Data, benchmark: str, moment: str) -> float:
    """The largest difference from the paper's column at a moment, in points."""
    measured = np.mean(data[benchmark][moment]["percent"], 0)
    return float(np.abs(measured - np.array(printed.VARIANCE[benchmark])).max())


def fits(data: Data, benchmark: str, moment: str) -> bool:
    """Whether the paper's column agrees with a moment."""
    return furthest(data, benchmark, moment) <= ALLOWED[benchmark]


def convention(data: Data, benchmark: str) -> str:
    """The moment that the paper's column is nearest to."""
    return min(MOMENTS, key=lambda moment: furthest(data, benchmark, moment))


def at(data: Data, benchmark: str, moment: str, count: int) -> float:
    """Percent that `count` components explain at a moment, mean over seeds."""
    column = data["counts"].index(count)
    return mean([seed[column] for seed in data[benchmark][moment]["percent"]])


VARIANCE = Artefact(
    _PROBE.name,
    "Explained variance",
    'appendix "Structure in the data", table and figure',
    measure,
    show,
    cells,
    probe=_PROBE,
)
