"""The change of the tangent kernel of PCA-OGD's network over the tasks, by dataset size."""

from math import nan
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from forgetless.paper.artefacts import table1
from forgetless.paper.benchmarks import NAMES, Run, Scale
from forgetless.paper.numbers import shown, table
from forgetless.paper.pictures import Pictures, panels
from forgetless.paper.results import Data, Results
from forgetless.paper.workshop import Artefact, Probe, Workshop, each_probed
from forgetless.support.statistics import mean
from forgetless.tangent import TangentFeatures
from forgetless.theory import kernel_change

BENCHMARKS = ("permuted", "rotated", "cifar")
_COLOURS = ("#E69F00", "#56B4E9", "#CC79A7", "#009E73")  # the paper's actual size is green


def _run(scale: Scale, benchmark: str, per_class: int) -> Run:
    """PCA-OGD on fewer training images per class; Table 1's run has the most."""
    if per_class == scale.benchmarks[benchmark].sizes[-1]:
        return table1.cell_run(scale, benchmark, "pca-ogd")
    settings: dict[str, Any] = {"train_per_class": per_class, "storage": "bfloat16"}
    return Run(scale.config(benchmark, "pca-ogd", **settings))


def cells(scale: Scale, results: Results) -> dict[str, Run]:
    """Every benchmark with less data than Table 1 has, and with as much."""
    return {
        f"{b}/{size}": _run(scale, b, size)
        for b in BENCHMARKS
        for size in scale.benchmarks[b].sizes
    }


def probe(workshop: Workshop, run: Run) -> dict[str, Any]:
    """The change of the kernel on samples of task 1, after every task, (S, T) each.

    "since start" is ‖K_t − K_0‖ / ‖K_0‖, "in task" ‖K_t − K_{t−1}‖ / ‖K_{t−1}‖ and "captured" the
    share ‖φ_t Vᵀ‖² / ‖φ_t‖² of the features at that time in the directions V (K, p) that were
    stored of task 1 when it ended.
    """
    replay = workshop.replay(run)
    samples = replay.samples(0, workshop.scale.overlap_samples, "samples of the kernel's change")
    first = [phi.gram() for phi in replay.features(samples)]
    before = first
    stored: list[Tensor] = []
    found: dict[str, list[list[float]]] = {"since start": [], "in task": [], "captured": []}
    for task in range(run.config.tasks):
        replay.at(task)
        if task == 0:
            replay.remember(task)
            stored = [rows for rows in replay.directions() if rows is not None]
        features = replay.features(samples)
        now = [phi.gram() for phi in features]
        found["since start"].append(list(map(kernel_change, first, now)))
        found["in task"].append(list(map(kernel_change, before, now)))
        pairs = zip(features, stored, strict=True)
        found["captured"].append([_captured(phi, rows) for phi, rows in pairs])
        before = now
    return {name: np.transpose(curve) for name, curve in found.items()}


def _captured(phi: TangentFeatures, rows: Tensor) -> float:
    """The share of the features (n, p) in the span of orthonormal rows (K, p)."""
    inside = phi @ rows.to(phi.like).T
    return float(inside.square().sum() / phi.squared_sum().sum())


PROBE = Probe("kernel-change", probe, version=2)  # the first had no "captured"


def growth(data: Data, benchmark: str) -> tuple[float, float]:
    """The share of the final change that is there after task 1, and R² of a line over tasks.

    For the size that the experiments use. R² is NaN for fewer than three tasks.
    """
    curve = np.mean(list(data[benchmark].values())[-1]["since start"], 0)
    tasks, share = np.arange(len(curve)), 1 / later_growth(data[benchmark], -1)
    if len(curve) < 3:
        return share, nan
    rest = curve - np.polyval(np.polyfit(tasks, curve, 1), tasks)
    linear = 1 - float(rest @ rest) / float(np.sum((curve - curve.mean()) ** 2) or 1)
    return share, linear


def later_growth(sizes: Data, which: int) -> float:
    """The change since the start, at the end over that after task 1, for one dataset size."""
    curve = np.mean(list(sizes.values())[which]["since start"], 0)
    return float(curve[-1] / curve[0])


def captured(sizes: Data) -> tuple[list[float], list[float]]:
    """The share of task 1's features in its stored directions, after task 1 and at the end.

    For the size that the experiments use.
    """
    first, *_, last = np.transpose(list(sizes.values())[-1]["captured"])
    return list(first), list(last)


def show(data: Data, pictures: Pictures) -> list[str]:
    """Change after the first, a middle and the last task; and the share that is captured."""
    rows = []
    for benchmark, sizes in data.items():
        for size, result in sizes.items():
            curve = np.transpose(result["since start"])
            picked = [curve[0], curve[len(curve) // 2], curve[-1]]
            last = mean(np.transpose(result["in task"])[-1])
            cells = [f"{mean(c):.2f}" for c in picked]
            rows.append([f"{NAMES[benchmark]}, {size} a class", *cells, f"{last:.3f}"])
    headings = [
        "‖K − K₀‖ / ‖K₀‖",
        "after task 1",
        "half way",
        "at the end",
        "in the last task alone",
    ]
    outdated = [
        [NAMES[benchmark], *(shown(100 * np.array(result)) for result in captured(sizes))]
        for benchmark, sizes in data.items()
    ]
    return [
        *table(headings, rows),
        *table(
            ["task 1's features in its stored directions, %", "after task 1", "at the end"],
            outdated,
        ),
        pictures.add("kernel-change", "Change of the tangent kernel", lambda: _figure(data)),
        "",
        "*Change of the tangent kernel of PCA-OGD's network on samples of task 1 since "
        "initialisation, by training images of a class; green is Table 1's run, the "
        "others store their rows in bfloat16.*",
        "",
    ]


def _figure(data: Data) -> Figure:
    figure, axes = panels(list(data))
    for panel, sizes in zip(axes, data.values(), strict=True):
        for (size, result), colour in zip(sizes.items(), _COLOURS[-len(sizes) :], strict=True):
            curve = np.mean(result["since start"], 0)
            tasks = np.arange(1, len(curve) + 1)
            panel.plot(tasks, curve, "o-", ms=3, color=colour, label=f"{size} a class")
        panel.set_xlabel("after task")
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=7)
    axes[0].set_ylabel("‖K − K₀‖ / ‖K₀‖")
    return figure


KERNEL_CHANGE = Artefact(
    PROBE.name,
    "Change of the tangent kernel",
    'appendix "NTK changes"',
    each_probed(PROBE),
    show,
    cells,
    probe=PROBE,
)
