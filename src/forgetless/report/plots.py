"""Pictures of results. Figures are made without pyplot, so no global state and no display."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from forgetless import metrics
from forgetless.trace import Trace

_PANEL = 3.3  # inches
_MOST_NUMBERS = 10  # tasks up to which the cells' numbers are legible


def plot_accuracy(traces: Sequence[Trace]) -> Figure:
    """The accuracy matrix of each run as a heat map: rows after a task, columns on a task.

    Forgetting is a column that darkens downwards. The mean over the finished seeds is shown.
    """
    columns = min(len(traces), 3)
    rows = math.ceil(len(traces) / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(columns * _PANEL + 0.9, rows * _PANEL + 0.5), layout=layout)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    image = None
    for panel, trace in zip(panels, traces, strict=False):
        seeds = trace.finished if trace.finished.any() else np.ones(len(trace.seeds), bool)
        accuracy = trace.accuracy[seeds].mean(0)
        image = panel.imshow(np.ma.masked_invalid(accuracy), vmin=0, vmax=100, cmap="viridis")
        tasks = len(trace.tasks)
        if tasks <= _MOST_NUMBERS:
            for (t, s), value in np.ndenumerate(accuracy):
                if np.isfinite(value):
                    colour = "black" if value > 65 else "white"
                    size = 9 if tasks <= 6 else 7
                    panel.text(
                        s, t, f"{value:.0f}", ha="center", va="center", color=colour, size=size
                    )
        every = max(1, math.ceil(tasks / 8))
        ticks = range(0, tasks, every)
        labels = [str(t + 1) for t in ticks]
        panel.set_xticks(ticks, labels)
        panel.set_yticks(ticks, labels)
        panel.spines[:].set_visible(False)
        average = np.nanmean(trace.per_seed(metrics.average_accuracy))
        forgotten = np.nanmean(trace.per_seed(metrics.forgetting))
        panel.set_title(f"{trace.method}\n$A_T$ {average:.1f}   $F_T$ {forgotten:.1f}", fontsize=11)
    for panel in panels[len(traces) :]:
        panel.set_visible(False)
    for panel in panels[::columns]:
        panel.set_ylabel("after learning task")
    for panel in panels[max(0, len(traces) - columns) : len(traces)]:
        panel.set_xlabel("accuracy on task")
    if image is not None:
        bar = figure.colorbar(image, ax=panels.tolist(), shrink=0.7, pad=0.02)
        bar.set_label("accuracy, %")
        bar.outline.set_visible(False)
    first = traces[0]
    figure.suptitle(f"{first.scenario}, {len(first.tasks)} tasks", fontsize=12)
    return figure
