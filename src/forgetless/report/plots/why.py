"""Why it was forgotten: figures from analyses, one for each method under its name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from forgetless.report.analysis import Analysis
from forgetless.report.comparison import shown
from forgetless.report.plots import looks
from forgetless.report.plots.looks import COLUMN, PAGE
from forgetless.support.errors import ConfigError, require

Analyses = Mapping[str, Analysis]


def overlap_spectra(
    analyses: Analyses, source: int = 0, target: int = 1, *, width: float = COLUMN
) -> Figure:
    """The singular values of O^{s→t} between two tasks (from 0), decreasing, one line a method."""
    figure, panel = looks.single(width)
    for index, (name, analysis) in enumerate(_some(analyses).items()):
        require(0 <= source < target, "source", source, f"a task before {target}")
        known = analysis.learned - 1
        require(target <= known, "target", target, f"an analysed task, up to {known}")
        values = analysis.overlap[f"{source}-{target}"]
        panel.plot(
            np.arange(len(values)) + 1, values, color=looks.colour(index), lw=1.1, label=shown(name)
        )
    looks.label(panel, x="direction", y="singular value of the overlap")
    panel.set_ylim(0, 1.02)
    looks.legend(figure, panel)
    return figure


def overlap_maps(analyses: Analyses, *, statistic: str = "largest", width: float = PAGE) -> Figure:
    """The overlap of every pair of tasks, one map a method.

    Arguments:
        statistic: "largest" or "mean" singular value.
    """
    require(statistic in ("largest", "mean"), "statistic", statistic, "largest or mean")
    figure, panels = looks.grid(width, len(_some(analyses)), 3 if width > COLUMN else 2, 1.0)
    image = None
    for panel, (name, analysis) in zip(panels.ravel(), analyses.items(), strict=False):
        matrix = np.full((analysis.learned, analysis.learned), np.nan)
        for pair, values in analysis.overlap.items():
            s, k = map(int, pair.split("-"))
            matrix[k, s] = max(values) if statistic == "largest" else float(np.mean(values))
        image = looks.heat_map(panel, matrix, 0, 1, "magma", lambda v: f"{v:.2f}")
        looks.label(panel, x="earlier task", y="later task", title=shown(name))
    looks.colour_bar(figure, image, panels, f"{statistic} singular value")
    return figure


def explained_variance(analyses: Analyses, task: int = 0, *, width: float = COLUMN) -> Figure:
    """The variance of a task's features that the first directions explain; a point: those kept."""
    figure, panel = looks.single(width)
    for index, (name, analysis) in enumerate(_some(analyses).items()):
        known = len(analysis.variance) - 1
        require(0 <= task <= known, "task", task, f"an analysed task, from 0 to {known}")
        variance = analysis.variance[task]
        percent = 100 * np.array(variance.curve)
        style: dict[str, Any] = {"color": looks.colour(index), "linewidth": 1.1}
        panel.plot(np.arange(len(percent)) + 1, percent, label=shown(name), **style)
        if variance.kept:
            kept = min(variance.kept, len(percent))
            panel.plot(kept, percent[kept - 1], looks.marker(index), color=looks.colour(index))
    panel.set_xscale("log")
    looks.label(panel, x="directions", y="explained variance, %")
    looks.legend(figure, panel)
    return figure


def forecast_against_measured(analyses: Analyses, *, width: float = COLUMN) -> Figure:
    """The change of accuracy that was forecast against the one that was measured, in points."""
    points = {name: a.forecast for name, a in _some(analyses).items() if a.forecast}
    if not points:
        raise ConfigError("analyses must have forecasts, and none of them has")
    figure, panel = looks.single(width, width)
    for index, name in enumerate(analyses):
        for point in points.get(name, ()):
            face = looks.colour(index) if point.trusted else "none"
            style: dict[str, Any] = {
                "markeredgecolor": looks.colour(index),
                "markerfacecolor": face,
            }
            panel.plot(point.predicted, point.measured, looks.marker(index), markersize=4, **style)
    ends = [v for found in points.values() for p in found for v in (p.predicted, p.measured)]
    line = [min(ends) - 1, max(*ends, 0) + 1]
    panel.plot(line, line, color="#59636d", linewidth=0.7, linestyle="--", zorder=0)
    for index, name in enumerate(analyses):
        if name in points:
            panel.plot([], [], looks.marker(index), color=looks.colour(index), label=shown(name))
    looks.label(panel, x="forecast change, points", y="measured change, points")
    panel.locator_params(nbins=5)
    looks.legend(figure, panel)
    return figure


def kernel_change(analyses: Analyses, task: int = 0, *, width: float = COLUMN) -> Figure:
    """How far the tangent kernel on a task moved, ‖K' − K‖ / ‖K‖, while later ones were learned."""
    figure, panel = looks.single(width)
    for index, (name, analysis) in enumerate(_some(analyses).items()):
        known = len(analysis.kernel) - 1
        require(0 <= task <= known, "task", task, f"an analysed task, from 0 to {known}")
        values = analysis.kernel[task]
        style: dict[str, Any] = {
            "color": looks.colour(index),
            "marker": looks.marker(index),
            "markersize": 3,
        }
        after = np.arange(len(values)) + task + 1
        panel.plot(after, values, linewidth=1.1, label=shown(name), **style)
    looks.label(panel, x="after learning task", y="relative change of the kernel")
    looks.whole_numbers(panel)
    looks.legend(figure, panel)
    return figure


def _some(analyses: Analyses) -> Analyses:
    if not isinstance(analyses, Mapping):
        kind = type(analyses).__name__
        raise ConfigError(f"analyses must be a mapping from methods' names to them, not {kind}")
    if not analyses:
        raise ConfigError(
            "analyses must not be empty: forgetless.report.analysis.analyse makes them"
        )
    return analyses
