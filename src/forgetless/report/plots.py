"""Figures for papers, from accuracies (what was forgotten) and from analyses (why).

Without pyplot, which has global state.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, NullLocator

from forgetless.methods import METHODS, method_label
from forgetless.report.analysis import Analysis
from forgetless.report.comparison import Comparison, compare
from forgetless.report.looks import Look, looks
from forgetless.support.files import write_atomically
from forgetless.support.validation import ConfigError, require
from forgetless.trace import Trace, average_accuracy, forgetting

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

COLUMN = 3.25  # inches: a column of a two-column paper
PAGE = 6.75  # both columns
_SMALL = 7  # points
_TEXT = 8

Runs = Trace | Sequence[Trace] | Comparison


def _comparison_of(runs: Runs) -> Comparison:
    """The comparison of runs of one scenario."""
    if isinstance(runs, Comparison):
        return runs
    made = compare(runs)
    if len(made) > 1:
        names = ", ".join(f"{c.title} ({c.measure})" for c in made)
        raise ConfigError(f"runs must be of one scenario for one figure, not of {names}")
    return made[0]


def _line_style(look: Look) -> dict[str, Any]:
    """Colour and dashes of an entry's line."""
    return {"color": look.colour, "linestyle": (0, look.dash) if look.dash else "-"}


def _marker_style(look: Look) -> dict[str, Any]:
    """The marker of an entry's points."""
    return {"marker": look.marker}


def _single_panel(width: float, height: float | None = None) -> tuple[Figure, Axes]:
    """A figure with one panel."""
    figure = _new_figure(width, width * 0.68 if height is None else height)
    panel = figure.subplots()
    _tidy(panel)
    return figure, panel


def _panel_grid(
    width: float, count: int, columns: int, ratio: float, **options: Any
) -> tuple[Figure, Any]:
    """A figure with `count` panels of one shape, height over width, and the panels."""
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = _new_figure(width, rows * (width / columns * ratio + 0.1) + 0.5)
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for unused in panels.ravel()[count:]:
        unused.set_visible(False)
    for panel in panels.ravel()[:count]:
        _tidy(panel)
    return figure, panels


def _new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03)
    return Figure(figsize=(width, height), layout=layout)


def _tidy(panel: Axes) -> None:
    """Thin lines, small type, no frame."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[:].set_linewidth(0.6)
    panel.tick_params(labelsize=_SMALL, width=0.6, length=2.5)
    panel.grid(True, axis="y", color="#e3e5e4", linewidth=0.5)
    panel.set_axisbelow(True)


def _set_labels(panel: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    """Label the axes."""
    panel.set_xlabel(x, fontsize=_TEXT)
    panel.set_ylabel(y, fontsize=_TEXT)
    if title:
        panel.set_title(title, fontsize=_TEXT, loc="left")


def _whole_numbers(panel: Axes, axis: str = "x") -> None:
    """Few ticks, at whole numbers."""
    chosen = panel.xaxis if axis == "x" else panel.yaxis
    chosen.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def _add_legend(figure: Figure, panel: Axes) -> None:
    """One legend for all panels, above them."""
    handles, names = panel.get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(
            handles,
            [name if len(name) < 30 else f"{name[:29]}…" for name in names],
            loc="outside upper center",
            ncols=min(len(names), 5 if figure.get_figwidth() > COLUMN else 3),
            frameon=False,
            fontsize=_SMALL,
            handlelength=1.4,
            columnspacing=1.0,
        )


def _heat_map(
    panel: Axes, matrix: Any, low: float, high: float, scheme: str, shown: Callable[[float], str]
) -> Any:
    """A matrix as coloured cells, with their numbers where there is room."""
    panel.grid(False)
    panel.spines[:].set_visible(False)
    image = panel.imshow(np.ma.masked_invalid(matrix), vmin=low, vmax=high, cmap=scheme)
    tasks = len(matrix)
    if tasks <= 7:
        for (row, column), value in np.ndenumerate(matrix):
            if np.isfinite(value):
                red, green, blue, _ = image.cmap(image.norm(value))
                ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
                panel.text(column, row, shown(value), ha="center", va="center", color=ink, size=6)
    ticks = range(0, tasks, max(1, -(-tasks // 6)))
    names = [str(t + 1) for t in ticks]
    panel.set_xticks(ticks, names)
    panel.set_yticks(ticks, names)
    return image


def _colour_bar(figure: Figure, image: Any, panels: Any, words: str) -> None:
    """The scale of the maps' colours."""
    bar = figure.colorbar(image, ax=panels.ravel().tolist(), shrink=0.8, pad=0.02, aspect=25)
    bar.set_label(words, fontsize=_TEXT)
    bar.ax.tick_params(labelsize=_SMALL, width=0.6, length=2.5)
    bar.outline.set_visible(False)


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as PDF, SVG or PNG, by the file's name; text in a PDF stays text."""
    file = Path(path)
    kind = file.suffix.removeprefix(".").lower()
    if kind not in ("pdf", "svg", "png"):
        raise ConfigError(f"path must end in .pdf, .svg or .png, not {file.name!r}")
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
        write_atomically(file, lambda new: figure.savefig(new, format=kind, dpi=300))
    return file


def accuracy_matrices(runs: Runs, *, width: float = PAGE, columns: int | None = None) -> Figure:
    """The accuracy matrix of each method as a heat map: rows after a task, columns on a task.

    Forgetting is a column that darkens downwards. The map shows the mean over the finished seeds.

    Arguments:
        runs: a trace, several, or a comparison of them.
        width: of the figure, in inches.
        columns: maps side by side; by default three, or two in a figure for one column of text.
    """
    comparison = _comparison_of(runs)
    entries = comparison.entries
    figure, panels = _panel_grid(width, len(entries), columns or (3 if width > COLUMN else 2), 1.0)
    image = None
    for panel, entry in zip(panels.ravel(), entries, strict=False):
        image = _heat_map(panel, entry.mean, 0, 100, "viridis", lambda v: f"{v:.0f}")
        means = [entry.spread(m) for m in (average_accuracy, forgetting)]
        average, forgotten = ("–" if m is None else f"{m[0]:.1f}" for m in means)
        _set_labels(panel, title=f"{entry.label}\n$A_T$ {average}   $F_T$ {forgotten}")
    for panel in panels[:, 0]:
        _set_labels(panel, y="after learning task", title=panel.get_title("left"))
    lowest = max(0, len(entries) - panels.shape[1])
    for panel in panels.ravel()[lowest : len(entries)]:
        panel.set_xlabel(f"{comparison.measure} on task", fontsize=8)
    _colour_bar(figure, image, panels, f"{comparison.measure}, %")
    return figure


def accuracy_curves(runs: Runs, *, width: float = PAGE) -> Figure:
    """The accuracy on every task over the run, one small panel per task, all methods in each."""
    comparison = _comparison_of(runs)
    learned = _learned(comparison.learned)
    figure, panels = _panel_grid(
        width, learned, 5 if width > COLUMN else 3, 0.8, sharex=True, sharey=True
    )
    for s, panel in enumerate(panels.ravel()[:learned]):
        for entry in comparison.entries:
            mean, std = entry.mean[s : entry.learned, s], entry.std[s : entry.learned, s]
            after = np.arange(s, s + len(mean)) + 1
            line = _line_style(entry.look) | ({"marker": "o", "ms": 2} if len(mean) == 1 else {})
            panel.plot(after, mean, label=entry.label, linewidth=1.1, **line)
            panel.fill_between(after, mean - std, mean + std, color=line["color"], alpha=0.15, lw=0)
        name = comparison.tasks[s]
        number = f"{s + 1}"
        _set_labels(panel, title=number if name == f"task {number}" else f"{number} · {name[:14]}")
        _whole_numbers(panel)
    figure.supxlabel("after learning task", fontsize=8)
    figure.supylabel(f"{comparison.measure}, %", fontsize=8)
    _add_legend(figure, panels.ravel()[0])
    return figure


def final_accuracy(runs: Runs, *, width: float = COLUMN) -> Figure:
    """The accuracy on every task at the end, with the standard deviation over the seeds."""
    comparison = _comparison_of(runs)
    _learned(comparison.learned)
    figure, panel = _single_panel(width)
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
            **_line_style(entry.look),
            **_marker_style(entry.look),
        )
    _set_labels(panel, x="task", y=f"{comparison.measure} at the end, %")
    _whole_numbers(panel)
    _add_legend(figure, panel)
    return figure


def accuracy_against_memory(runs: Runs, *, width: float = COLUMN) -> Figure:
    """A_T of each method against the bytes of its memory for a seed at the end."""
    comparison = _comparison_of(runs)
    known = [
        (entry, memory, average)
        for entry in comparison.entries
        if (memory := entry.memory_bytes) is not None
        and (average := entry.spread(average_accuracy)) is not None
    ]
    if not known:
        raise ConfigError("runs must have stored the methods' memory, and none of them has")
    figure, panel = _single_panel(width)
    for entry, memory, (mean, std) in known:
        style = _line_style(entry.look) | _marker_style(entry.look) | {"linestyle": ""}
        panel.errorbar(memory, mean, std, elinewidth=0.8, markersize=4, **style)
        panel.annotate(
            entry.label, (memory, mean), (0, 5), textcoords="offset points", ha="center", fontsize=7
        )
    panel.set_xscale("symlog", linthresh=1000)
    powers = range(4, int(np.log10(max(10_000, *(m for _, m, _ in known)))) + 1)
    panel.set_xticks([0, *(10**power for power in powers)])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(left=-300)
    panel.margins(x=0.12, y=0.15)
    _set_labels(panel, x="memory for a seed, bytes", y=f"$A_T$ ({comparison.measure}), %")
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
    figure, panel = _single_panel(width)
    for label, look, analysis in _entries(analyses):
        require(0 <= source < target, "source", source, f"a task before {target}")
        known = analysis.learned - 1
        require(target <= known, "target", target, f"an analysed task, up to {known}")
        values = analysis.overlap[f"{source}-{target}"]
        panel.plot(np.arange(len(values)) + 1, values, lw=1.1, label=label, **_line_style(look))
    _set_labels(panel, x="direction", y="singular value of the overlap")
    panel.set_ylim(0, 1.02)
    _add_legend(figure, panel)
    return figure


def overlap_maps(analyses: Analyses, *, statistic: str = "largest", width: float = PAGE) -> Figure:
    """The overlap of every pair of tasks, one map per method.

    Arguments:
        statistic: "largest" or "mean" singular value.
    """
    statistics = ("largest", "mean")
    require(statistic in statistics, "statistic", statistic, "largest or mean", statistics)
    entries = _entries(analyses)
    figure, panels = _panel_grid(width, len(entries), 3 if width > COLUMN else 2, 1.0)
    image = None
    for panel, (label, _, analysis) in zip(panels.ravel(), entries, strict=False):
        matrix = np.full((analysis.learned, analysis.learned), np.nan)
        for pair, values in analysis.overlap.items():
            s, k = map(int, pair.split("-"))
            matrix[k, s] = max(values) if statistic == "largest" else float(np.mean(values))
        image = _heat_map(panel, matrix, 0, 1, "magma", lambda v: f"{v:.2f}")
        _set_labels(panel, x="earlier task", y="later task", title=label)
    _colour_bar(figure, image, panels, f"{statistic} singular value")
    return figure


def explained_variance(analyses: Analyses, task: int = 0, *, width: float = COLUMN) -> Figure:
    """The explained variance of a task's features; a point marks the directions stored."""
    figure, panel = _single_panel(width)
    for label, look, analysis in _entries(analyses):
        known = len(analysis.variance) - 1
        require(0 <= task <= known, "task", task, f"an analysed task, from 0 to {known}")
        variance = analysis.variance[task]
        percent = 100 * np.array(variance.curve)
        line = _line_style(look)
        panel.plot(np.arange(len(percent)) + 1, percent, linewidth=1.1, label=label, **line)
        if variance.kept:
            kept = min(variance.kept, len(percent))
            panel.plot(kept, percent[kept - 1], **line, **_marker_style(look))
    panel.set_xscale("log")
    _set_labels(panel, x="directions", y="explained variance, %")
    _add_legend(figure, panel)
    return figure


def forecast_against_measured(analyses: Analyses, *, width: float = COLUMN) -> Figure:
    """The forecast change of accuracy against the measured change, in points."""
    entries = [entry for entry in _entries(analyses) if entry[2].forecast]
    if not entries:
        raise ConfigError("analyses must have forecasts, and none of them has")
    figure, panel = _single_panel(width, width)
    ends = [0.0]
    for label, look, analysis in entries:
        colour = look.colour
        for point in analysis.forecast:
            face: dict[str, Any] = {"markerfacecolor": colour if point.trusted else "none"}
            panel.plot(
                point.predicted, point.measured, color=colour, ms=4, **_marker_style(look), **face
            )
            ends += [point.predicted, point.measured]
        panel.plot([], [], color=colour, linestyle="", label=label, **_marker_style(look))
    line = [min(ends) - 1, max(ends) + 1]
    panel.plot(line, line, color="#59636d", linewidth=0.7, linestyle="--", zorder=0)
    _set_labels(panel, x="forecast change, points", y="measured change, points")
    panel.locator_params(nbins=5)
    _add_legend(figure, panel)
    return figure


def kernel_change(analyses: Analyses, task: int = 0, *, width: float = COLUMN) -> Figure:
    """The change of the tangent kernel on a task, ‖K' − K‖ / ‖K‖, while later tasks are learned."""
    figure, panel = _single_panel(width)
    for label, look, analysis in _entries(analyses):
        known = len(analysis.kernel) - 1
        require(0 <= task <= known, "task", task, f"an analysed task, from 0 to {known}")
        values = analysis.kernel[task]
        style = _line_style(look) | _marker_style(look)
        after = np.arange(len(values)) + task + 1
        panel.plot(after, values, linewidth=1.1, markersize=3, label=label, **style)
    _set_labels(panel, x="after learning task", y="relative change of the kernel")
    _whole_numbers(panel)
    _add_legend(figure, panel)
    return figure


def _entries(analyses: Analyses) -> list[tuple[str, Look, Analysis]]:
    """The label, look and analysis of each."""
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
    return list(zip(labels, looks(methods), analyses.values(), strict=True))
