"""Figures from analyses, each by the name of a method: why it was forgotten."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from forgetless.methods import METHODS, method_label
from forgetless.report.analysis import Analysis
from forgetless.report.palette import places
from forgetless.report.plots import style
from forgetless.report.plots.style import COLUMN, PAGE
from forgetless.support.errors import ConfigError, require

Analyses = Mapping[str, Analysis]  # by the label of an entry, or the name of a method


def overlap_spectra(
    analyses: Analyses, source: int = 0, target: int = 1, *, width: float = COLUMN
) -> Figure:
    """The singular values of O^{s→t} of two tasks (from 0), decreasing, one line per method."""
    figure, panel = style.single(width)
    for label, place, analysis in _entries(analyses):
        require(0 <= source < target, "source", source, f"a task before {target}")
        known = analysis.learned - 1
        require(target <= known, "target", target, f"an analysed task, up to {known}")
        values = analysis.overlap[f"{source}-{target}"]
        panel.plot(np.arange(len(values)) + 1, values, lw=1.1, label=label, **style.line(place))
    style.label(panel, x="direction", y="singular value of the overlap")
    panel.set_ylim(0, 1.02)
    style.legend(figure, panel)
    return figure


def overlap_maps(analyses: Analyses, *, statistic: str = "largest", width: float = PAGE) -> Figure:
    """The overlap of every pair of tasks, one map per method.

    Arguments:
        statistic: "largest" or "mean" singular value.
    """
    require(statistic in ("largest", "mean"), "statistic", statistic, "largest or mean")
    entries = _entries(analyses)
    figure, panels = style.grid(width, len(entries), 3 if width > COLUMN else 2, 1.0)
    image = None
    for panel, (label, _, analysis) in zip(panels.ravel(), entries, strict=False):
        matrix = np.full((analysis.learned, analysis.learned), np.nan)
        for pair, values in analysis.overlap.items():
            s, k = map(int, pair.split("-"))
            matrix[k, s] = max(values) if statistic == "largest" else float(np.mean(values))
        image = style.heat_map(panel, matrix, 0, 1, "magma", lambda v: f"{v:.2f}")
        style.label(panel, x="earlier task", y="later task", title=label)
    style.colour_bar(figure, image, panels, f"{statistic} singular value")
    return figure


def explained_variance(analyses: Analyses, task: int = 0, *, width: float = COLUMN) -> Figure:
    """The explained variance of a task's features; a point marks the directions stored."""
    figure, panel = style.single(width)
    for label, place, analysis in _entries(analyses):
        known = len(analysis.variance) - 1
        require(0 <= task <= known, "task", task, f"an analysed task, from 0 to {known}")
        variance = analysis.variance[task]
        percent = 100 * np.array(variance.curve)
        line = style.line(place)
        panel.plot(np.arange(len(percent)) + 1, percent, linewidth=1.1, label=label, **line)
        if variance.kept:
            kept = min(variance.kept, len(percent))
            panel.plot(kept, percent[kept - 1], **line, **style.marker(place))
    panel.set_xscale("log")
    style.label(panel, x="directions", y="explained variance, %")
    style.legend(figure, panel)
    return figure


def forecast_against_measured(analyses: Analyses, *, width: float = COLUMN) -> Figure:
    """The forecast change of accuracy against the measured change, in points."""
    entries = [entry for entry in _entries(analyses) if entry[2].forecast]
    if not entries:
        raise ConfigError("analyses must have forecasts, and none of them has")
    figure, panel = style.single(width, width)
    ends = [0.0]
    for label, place, analysis in entries:
        colour = style.line(place)["color"]
        for point in analysis.forecast:
            face: dict[str, Any] = {"markerfacecolor": colour if point.trusted else "none"}
            panel.plot(
                point.predicted, point.measured, color=colour, ms=4, **style.marker(place), **face
            )
            ends += [point.predicted, point.measured]
        panel.plot([], [], color=colour, linestyle="", label=label, **style.marker(place))
    line = [min(ends) - 1, max(ends) + 1]
    panel.plot(line, line, color="#59636d", linewidth=0.7, linestyle="--", zorder=0)
    style.label(panel, x="forecast change, points", y="measured change, points")
    panel.locator_params(nbins=5)
    style.legend(figure, panel)
    return figure


def kernel_change(analyses: Analyses, task: int = 0, *, width: float = COLUMN) -> Figure:
    """The change of the tangent kernel on a task, ‖K' − K‖ / ‖K‖, while later tasks are learned."""
    figure, panel = style.single(width)
    for label, place, analysis in _entries(analyses):
        known = len(analysis.kernel) - 1
        require(0 <= task <= known, "task", task, f"an analysed task, from 0 to {known}")
        values = analysis.kernel[task]
        look = style.line(place) | style.marker(place)
        after = np.arange(len(values)) + task + 1
        panel.plot(after, values, linewidth=1.1, markersize=3, label=label, **look)
    style.label(panel, x="after learning task", y="relative change of the kernel")
    style.whole_numbers(panel)
    style.legend(figure, panel)
    return figure


def _entries(analyses: Analyses) -> list[tuple[str, int, Analysis]]:
    """The label, place in the palette and analysis of each."""
    if not isinstance(analyses, Mapping):
        kind = type(analyses).__name__
        raise ConfigError(f"analyses must be a mapping from methods' names to them, not {kind}")
    if not analyses:
        raise ConfigError(
            "analyses must not be empty: forgetless.report.analysis.analyse makes them"
        )
    names = {method_label(name): name for name in METHODS}
    labels = [method_label(name) for name in analyses]
    methods = [names.get(label.split(",")[0], label) for label in labels]
    return list(zip(labels, places(methods), analyses.values(), strict=True))
