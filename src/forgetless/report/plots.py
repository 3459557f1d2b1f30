"""Figures for papers, from accuracies (what was forgotten, and when) and from analyses (why)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from forgetless.methods import METHODS, method_label
from forgetless.report import style
from forgetless.report.analysis import Analysis
from forgetless.report.palette import places
from forgetless.report.style import COLUMN, PAGE, Runs, save
from forgetless.support.validation import ConfigError, require
from forgetless.trace import metrics

__all__ = [
    "COLUMN",
    "PAGE",
    "accuracy_against_memory",
    "accuracy_curves",
    "accuracy_matrices",
    "explained_variance",
    "final_accuracy",
    "forecast_against_measured",
    "kernel_change",
    "overlap_maps",
    "overlap_spectra",
    "save",
]


def accuracy_matrices(runs: Runs, *, width: float = PAGE) -> Figure:
    """The accuracy matrix of each method as a heat map: rows after a task, columns on a task.

    Forgetting is a column that darkens downwards. The map shows the mean over the finished seeds.
    """
    comparison = style.comparison_of(runs)
    entries = comparison.entries
    figure, panels = style.grid(width, len(entries), 3 if width > COLUMN else 2, 1.0)
    image = None
    for panel, entry in zip(panels.ravel(), entries, strict=False):
        image = style.heat_map(panel, entry.mean, 0, 100, "viridis", lambda v: f"{v:.0f}")
        means = [entry.spread(m) for m in (metrics.average_accuracy, metrics.forgetting)]
        average, forgotten = ("–" if m is None else f"{m[0]:.1f}" for m in means)
        style.label(panel, title=f"{entry.label}\n$A_T$ {average}   $F_T$ {forgotten}")
    for panel in panels[:, 0]:
        style.label(panel, y="after learning task", title=panel.get_title("left"))
    lowest = max(0, len(entries) - panels.shape[1])
    for panel in panels.ravel()[lowest : len(entries)]:
        panel.set_xlabel(f"{comparison.measure} on task", fontsize=8)
    style.colour_bar(figure, image, panels, f"{comparison.measure}, %")
    return figure


def accuracy_curves(runs: Runs, *, width: float = PAGE) -> Figure:
    """The accuracy on every task over the run, one small panel per task, all methods in each."""
    comparison = style.comparison_of(runs)
    learned = _learned(comparison.learned)
    figure, panels = style.grid(
        width, learned, 5 if width > COLUMN else 3, 0.8, sharex=True, sharey=True
    )
    for s, panel in enumerate(panels.ravel()[:learned]):
        for entry in comparison.entries:
            mean, std = entry.mean[s : entry.learned, s], entry.std[s : entry.learned, s]
            after = np.arange(s, s + len(mean)) + 1
            line = style.line(entry.place) | ({"marker": "o", "ms": 2} if len(mean) == 1 else {})
            panel.plot(after, mean, label=entry.label, linewidth=1.1, **line)
            panel.fill_between(after, mean - std, mean + std, color=line["color"], alpha=0.15, lw=0)
        name = comparison.tasks[s]
        number = f"{s + 1}"
        style.label(panel, title=number if name == f"task {number}" else f"{number} · {name[:14]}")
        style.whole_numbers(panel)
    figure.supxlabel("after learning task", fontsize=8)
    figure.supylabel(f"{comparison.measure}, %", fontsize=8)
    style.legend(figure, panels.ravel()[0])
    return figure


def final_accuracy(runs: Runs, *, width: float = COLUMN) -> Figure:
    """The accuracy on every task at the end, with the standard deviation over the seeds."""
    comparison = style.comparison_of(runs)
    _learned(comparison.learned)
    figure, panel = style.single(width)
    for entry in comparison.entries:
        last = entry.learned - 1
        if last < 0:
            continue
        panel.errorbar(
            np.arange(last + 1) + 1,
            entry.mean[last, : last + 1],
            entry.std[last, : last + 1],
            markersize=3,
            linewidth=1.0,
            elinewidth=0.7,
            label=entry.label,
            **style.line(entry.place),
            **style.marker(entry.place),
        )
    style.label(panel, x="task", y=f"{comparison.measure} at the end, %")
    style.whole_numbers(panel)
    style.legend(figure, panel)
    return figure


def accuracy_against_memory(runs: Runs, *, width: float = COLUMN) -> Figure:
    """A_T of each method against the bytes of its memory for a seed at the end."""
    comparison = style.comparison_of(runs)
    known = [
        (entry, memory, average)
        for entry in comparison.entries
        if (memory := entry.memory_bytes) is not None
        and (average := entry.spread(metrics.average_accuracy)) is not None
    ]
    if not known:
        raise ConfigError("runs must have stored the methods' memory, and none of them has")
    figure, panel = style.single(width)
    for entry, memory, (mean, std) in known:
        look = style.line(entry.place) | style.marker(entry.place) | {"linestyle": ""}
        panel.errorbar(memory, mean, std, elinewidth=0.8, markersize=4, **look)
        panel.annotate(
            entry.label, (memory, mean), (0, 5), textcoords="offset points", ha="center", fontsize=7
        )
    panel.set_xscale("symlog", linthresh=1000)
    powers = range(4, int(np.log10(max(10_000, *(m for _, m, _ in known)))) + 1)
    panel.set_xticks([0, *(10**power for power in powers)])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(left=-300)
    panel.margins(x=0.12, y=0.15)
    style.label(panel, x="memory for a seed, bytes", y=f"$A_T$ ({comparison.measure}), %")
    return figure


def _learned(count: int) -> int:
    if count == 0:
        raise ConfigError("runs must have learned a task to its end, and none of them has")
    return count


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
