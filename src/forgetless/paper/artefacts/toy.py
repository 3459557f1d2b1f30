"""The worst-case toy: linear regression on data without structure, OGD against PCA-OGD."""

import itertools
from dataclasses import dataclass
from math import ceil
from typing import Any, final

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from forgetless.methods import method_label
from forgetless.paper.numbers import shown, table
from forgetless.paper.pictures import Pictures, legend_below, panels
from forgetless.paper.results import Data
from forgetless.paper.workshop import Artefact, Cells, Workshop
from forgetless.report.looks import method_colour
from forgetless.support.statistics import mean
from forgetless.theory import (
    ComponentProjection,
    LinearTask,
    NoProjection,
    Projection,
    SampleProjection,
    explained_variance,
    learn,
    remembered,
)
from forgetless.theory.overlap import Protected, projected

TASKS, MEMORY, SHOWN = 15, 25, 9  # from the paper: tasks, memory of each, tasks shown
_NOISE = 0.1
_WEIGHT_DECAY = 10.0  # without it the test loss of n ≈ p samples is mostly fitted noise
_SEEDS, _MEAN_SEEDS = 10, 20
CENTRED = "PCA-OGD, centred"


def measure(workshop: Workshop, cells: Cells) -> dict[str, Any]:
    """For every (n, p) the explained variance, and the relative rise of the loss by method.

    The rise is the mean over the first nine tasks of the loss at the end minus that right after
    the task, divided by the variance of the targets, on test samples, on the training samples and
    on the samples that OGD remembers.
    """
    return {f"{n} {p}": _setting(n, p, workshop.device) for n, p in workshop.scale.toy}


def _setting(n: int, p: int, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"explained": []}
    for seed in range(_SEEDS):
        generator = torch.Generator().manual_seed(seed)
        tasks, tests = zip(*(_task(n, p, generator, device) for _ in range(TASKS)), strict=True)
        first = tasks[0].features
        curve = explained_variance(first @ first.T)
        found["explained"].append(100 * float(curve[MEMORY - 1]))
        methods: dict[str, Projection] = {
            "sgd": NoProjection(),
            "ogd": SampleProjection(MEMORY, seed),
            "pca-ogd": ComponentProjection(MEMORY),
        }
        for name, method in methods.items():
            learned = learn(tasks, method, weight_decay=_WEIGHT_DECAY)
            weights = learned.weights
            rises = []
            for s in range(SHOWN):
                kept = remembered(MEMORY, seed, s, n)
                own = LinearTask(
                    tasks[s].features[kept], tasks[s].targets[kept], tasks[s].outputs[kept]
                )
                losses = [_losses(weights, task) for task in (tests[s], tasks[s], own)]
                rises.append([float(loss[-1] - loss[s + 1]) for loss in losses])
                if s == 0 and seed == 0:
                    found.setdefault("curve", {})[name] = losses[0][1:]
            result = found.setdefault("rise", {}).setdefault(name, [])
            result.append(np.mean(rises, 0))
    return found


def _task(
    n: int, p: int, generator: torch.Generator, device: torch.device, shift: float = 0.0
) -> tuple[LinearTask, LinearTask]:
    """Training and test samples of one task: x ~ N(μ 1, I), y = ⟨x, w⟩ + ε with ‖w‖ = 1."""
    w = torch.randn(p, generator=generator, dtype=torch.float64)
    w = w / w.norm()
    tasks = []
    for _ in range(2):
        x = torch.randn(n, p, generator=generator, dtype=torch.float64) + shift
        y = x @ w + _NOISE * torch.randn(n, generator=generator, dtype=torch.float64)
        tasks.append(LinearTask(x.to(device), y.to(device), torch.zeros_like(y).to(device)))
    return tasks[0], tasks[1]


def _losses(weights: Tensor, task: LinearTask) -> list[float]:
    """Mean squared error after each task over the targets' mean square, (T + 1,)."""
    error = (task.features @ weights.T - task.targets.unsqueeze(1)).square().mean(0)
    relative: Tensor = error / task.targets.square().mean()
    return [float(value) for value in relative.cpu()]


def rise(data: Data, setting: str, method: str, where: int) -> float:
    """Mean rise of the loss: where is 0 for test, 1 for training, 2 for remembered samples."""
    return mean([seed[where] for seed in data[setting]["rise"][method]])


def show(data: Data, pictures: Pictures) -> list[str]:
    """Rise of the loss in every setting, and the loss of task 1 over time in one."""
    rows = []
    seeds = len(next(iter(data.values()))["explained"])
    for setting, result in data.items():
        n, p = setting.split()
        for method in result["rise"]:
            cells = [f"{rise(data, setting, method, where):+.2f}" for where in range(3)]
            rows.append(
                [f"n = {n}, p = {p}, {method_label(method)}", shown(result["explained"]), *cells]
            )
    headings = [
        "", f"% of variance in {MEMORY} components", "test", "training", "OGD's remembered samples",
    ]  # fmt: skip
    return [
        f"{TASKS} tasks, x ~ N(0, I), a target of its own for each task, {MEMORY} samples or "
        f"directions stored of each; ridge regression, {seeds} seeds. The paper states neither n "
        "nor p, only that 25 components, 5 % of all, explain 26 %. Rise of the squared error on "
        f"the first {SHOWN} tasks, in units of the targets' variance:",
        "",
        *table(headings, rows),
        *_full(data),
        pictures.add("toy", "Loss on task 1 over the tasks of the toy", lambda: _figure(data)),
        "",
        "*Test loss on task 1 after each task, one seed.*",
        "",
    ]


def _full(data: Data) -> list[str]:
    """The settings in which no direction is left long before the last task."""
    sizes = sorted({int(setting.split()[1]) for setting in data})
    few = [f"p = {p} after task {ceil(p / MEMORY)}" for p in sizes if p < MEMORY * (TASKS - 1)]
    if not few:
        return []
    what = "All directions are taken, and nothing more is learned by OGD and PCA-OGD, for"
    return [f"{what} {', '.join(few)}.", ""]


def _figure(data: Data) -> Figure:
    settings = list(data)
    titles = ["n = {}, p = {}".format(*setting.split()) for setting in settings]
    figure, axes = panels(titles, width=2.4)
    for panel, setting in zip(axes, settings, strict=True):
        for method, curve in data[setting]["curve"].items():
            tasks = range(1, len(curve) + 1)
            panel.plot(tasks, curve, color=method_colour(method), label=method_label(method))
        panel.set_xlabel("after task")
        panel.set_ylim(bottom=0)
    axes[0].set_ylabel("loss on task 1")
    legend_below(figure, axes[0], 3)
    return figure


# Samples with a mean, which centred PCA does not store, and few steps of descent


@final
@dataclass(frozen=True)
class _FewSteps:
    """A number of full-batch steps of projected descent at the rate 1 / ‖φ‖²."""

    count: int

    def solve(
        self, features: Tensor, residual: Tensor, basis: Protected, weight_decay: float, rtol: float
    ) -> Tensor:
        """ω_k − ω_{k−1}, (p,)."""
        inside = projected(features, basis)
        rate = 1 / torch.linalg.matrix_norm(features, 2).square()
        w = features.new_zeros(features.shape[1])
        for _ in range(self.count):
            w = w - rate * (inside.T @ (inside @ w - residual))
        return projected(w.unsqueeze(0), basis).squeeze(0)


_MEANS = (0.0, 1.0, 2.0)  # of every coordinate, in its standard deviations
_STEPS = 30
_WITH_MEAN = ("SGD", "OGD", "PCA-OGD, uncentred", CENTRED)


def _with_mean(name: str, seed: int) -> Projection:
    if name == "SGD":
        return NoProjection()
    if name == "OGD":
        return SampleProjection(MEMORY, seed)
    return ComponentProjection(MEMORY, centred=name == CENTRED)


def measure_mean(workshop: Workshop, cells: Cells) -> dict[str, Any]:
    """Mean → method → rise of the test loss on the first nine tasks, by seed."""
    n, p = workshop.scale.toy_mean
    found: dict[str, Any] = {f"{mean:g}": {name: [] for name in _WITH_MEAN} for mean in _MEANS}
    for shift, seed in itertools.product(_MEANS, range(_MEAN_SEEDS)):
        generator = torch.Generator().manual_seed(seed)
        drawn = (_task(n, p, generator, workshop.device, shift) for _ in range(TASKS))
        tasks, tests = zip(*drawn, strict=True)
        for name in _WITH_MEAN:
            weights = learn(tasks, _with_mean(name, seed), solver=_FewSteps(_STEPS)).weights
            losses = [_losses(weights, test) for test in tests[:SHOWN]]
            rises = [loss[-1] - loss[s + 1] for s, loss in enumerate(losses)]
            found[f"{shift:g}"][name].append(np.mean(rises))
    return {"n": n, "p": p, "means": found}


def show_mean(data: Data, pictures: Pictures) -> list[str]:
    """One row per mean."""
    rows = [
        [f"μ = {mean} σ", *(shown(values, 2) for values in methods.values())]
        for mean, methods in data["means"].items()
    ]
    return [
        *table(["rise of the test loss", *_WITH_MEAN], rows),
        f"The same toy with n = {data['n']}, p = {data['p']} and x ~ N(μ 1, I), learned in "
        f"{_STEPS} full-batch steps at the rate 1 / ‖φ‖²; {_MEAN_SEEDS} seeds. The paper writes "
        "N(μ, σ) without either, and the released PCA is centred: it stores everything but the "
        "mean, along which most is learned and lost.",
        "",
    ]


TOY_MEAN = Artefact(
    "toy-mean",
    "The worst case with a mean",
    "appendix, worst-case scenario",
    measure_mean,
    show_mean,
)
TOY = Artefact(
    "toy",
    "The worst case for PCA-OGD",
    "appendix, worst-case scenario",
    measure,
    show,
)
