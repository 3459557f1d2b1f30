"""What was forgotten, and when: figures from accuracy matrices."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from forgetless.report.comparison import Entry, shown
from forgetless.report.plots import looks
from forgetless.report.plots.looks import COLUMN, PAGE, Runs
from forgetless.support.errors import ConfigError
from forgetless.trace import metrics


def accuracy_matrices(runs: Runs, *, width: float = PAGE) -> Figure:
    """The accuracy matrix of each method as a heat map: rows after a task, columns on a task.

    Forgetting is a column that darkens downwards. The mean over the finished seeds is shown.
    """
    comparison = looks.comparison_of(runs)
    entries = comparison.entries
    figure, panels = looks.grid(width, len(entries), 3 if width > COLUMN else 2, 1.0)
    image = None
    for panel, entry in zip(panels.ravel(), entries, strict=False):
        image = looks.heat_map(panel, entry.mean, 0, 100, "viridis", lambda v: f"{v:.0f}")
        means = [entry.spread(m) for m in (metrics.average_accuracy, metrics.forgetting)]
        average, forgotten = ("–" if m is None else f"{m[0]:.1f}" for m in means)
        title = f"{shown(entry.label)}\n$A_T$ {average}   $F_T$ {forgotten}"
        looks.label(panel, title=title)
    for panel in panels[:, 0]:
        looks.label(panel, y="after learning task", title=panel.get_title("left"))
    lowest = max(0, len(entries) - panels.shape[1])
    for panel in panels.ravel()[lowest : len(entries)]:
        panel.set_xlabel("accuracy on task", fontsize=8)
    looks.colour_bar(figure, image, panels, "accuracy, %")
    return figure


def accuracy_courses(runs: Runs, *, width: float = PAGE) -> Figure:
    """The accuracy on every task over the run, one small panel a task, all methods in each."""
    comparison = looks.comparison_of(runs)
    learned = _learned(comparison.learned)
    figure, panels = looks.grid(
        width, learned, 5 if width > COLUMN else 3, 0.8, sharex=True, sharey=True
    )
    for s, panel in enumerate(panels.ravel()[:learned]):
        for index, entry in enumerate(comparison.entries):
            mean, std = entry.mean[s : entry.learned, s], entry.std[s : entry.learned, s]
            after = np.arange(s, s + len(mean)) + 1
            style: dict[str, Any] = {"marker": "o", "markersize": 2} if len(mean) == 1 else {}
            line: dict[str, Any] = {"color": looks.colour(index), "linewidth": 1.1} | style
            panel.plot(after, mean, label=shown(entry.label), **line)
            panel.fill_between(
                after, mean - std, mean + std, color=looks.colour(index), alpha=0.15, lw=0
            )
        name = comparison.tasks[s]
        number = f"{s + 1}"
        looks.label(panel, title=number if name == f"task {number}" else f"{number} · {name[:14]}")
        looks.whole_numbers(panel)
    figure.supxlabel("after learning task", fontsize=8)
    figure.supylabel("accuracy, %", fontsize=8)
    looks.legend(figure, panels.ravel()[0])
    return figure


def final_accuracy(runs: Runs, *, width: float = COLUMN) -> Figure:
    """The accuracy on every task at the end, with the standard deviation over the seeds."""
    comparison = looks.comparison_of(runs)
    _learned(comparison.learned)
    figure, panel = looks.single(width)
    for index, entry in enumerate(comparison.entries):
        last = entry.learned - 1
        if last < 0:
            continue
        tasks = np.arange(last + 1) + 1
        panel.errorbar(
            tasks,
            entry.mean[last, : last + 1],
            entry.std[last, : last + 1],
            color=looks.colour(index),
            marker=looks.marker(index),
            markersize=3,
            linewidth=1.0,
            elinewidth=0.7,
            label=shown(entry.label),
        )
    looks.label(panel, x="task", y="accuracy at the end, %")
    looks.whole_numbers(panel)
    looks.legend(figure, panel)
    return figure


def accuracy_against_memory(runs: Runs, *, width: float = COLUMN) -> Figure:
    """A_T of each method against the bytes that it keeps for a seed at the end."""
    comparison = looks.comparison_of(runs)
    known = [
        (index, entry, memory, average)
        for index, entry in enumerate(comparison.entries)
        if (memory := entry.memory_bytes) is not None
        and (average := entry.spread(metrics.average_accuracy)) is not None
    ]
    if not known:
        raise ConfigError("runs must have kept the methods' memory, and none of them has")
    figure, panel = looks.single(width)
    for index, entry, memory, (mean, std) in known:
        style: dict[str, Any] = {
            "color": looks.colour(index),
            "marker": looks.marker(index),
            "markersize": 4,
        }
        panel.errorbar(memory, mean, std, elinewidth=0.8, linestyle="", **style)
        _name(panel, entry, memory, mean)
    panel.set_xscale("symlog", linthresh=1000)
    powers = range(4, int(np.log10(max(10_000, *(m for _, _, m, _ in known)))) + 1)
    panel.set_xticks([0, *(10**power for power in powers)])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(left=-300)
    panel.margins(x=0.12, y=0.15)
    looks.label(panel, x="memory for a seed, bytes", y="$A_T$, %")
    return figure


def _name(panel: Axes, entry: Entry, x: float, y: float) -> None:
    panel.annotate(
        shown(entry.label), (x, y), (0, 5), textcoords="offset points", ha="center", fontsize=7
    )


def _learned(count: int) -> int:
    if count == 0:
        raise ConfigError("runs must have learned a task to its end, and none of them has")
    return count
