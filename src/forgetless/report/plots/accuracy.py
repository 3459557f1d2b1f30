"""Figures from accuracy matrices: what was forgotten, and when."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from forgetless.report.plots import style
from forgetless.report.plots.style import COLUMN, PAGE, Runs
from forgetless.support.errors import ConfigError
from forgetless.trace import metrics


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
