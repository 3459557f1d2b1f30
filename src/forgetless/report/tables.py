"""Tables of results for the terminal."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from forgetless.report.comparison import Comparison, Entry, compare
from forgetless.trace import Metric, Trace, metrics


def comparison_table(runs: Sequence[Trace] | Comparison) -> Table:
    """One row per entry: A_T, F_T and BWT over the seeds, and the time."""
    comparison = runs if isinstance(runs, Comparison) else compare(runs)[0]
    entries = comparison.entries
    seeds = _count(len(entries[0].trace.seeds), "seed")
    table = Table(title=f"{comparison.title}: {_count(len(comparison.tasks), 'task')}, {seeds}")
    table.add_column("method", style="bold")
    for heading in ("A_T", "F_T", "BWT", "seconds"):
        table.add_column(heading, justify="right")

    def average(entry: Entry) -> float:
        return (entry.spread(metrics.average_accuracy) or (-np.inf,))[0]

    best = max(entries, key=average)
    for entry in entries:
        status = entry.trace.status
        table.add_row(
            entry.label + ("" if status == "complete" else f" ({status})"),
            _cell(entry, metrics.average_accuracy),
            _cell(entry, metrics.forgetting),
            _cell(entry, metrics.backward_transfer),
            f"{entry.trace.timings.get('total', 0.0):.1f}",
            style="green" if entry is best and len(entries) > 1 else None,
        )
    table.caption = (
        f"A_T: mean {comparison.measure} on all tasks at the end, %. "
        "F_T: mean drop from the best, points."
    )
    return table


def task_table(trace: Trace) -> Table:
    """Accuracy on each task, right after it was learned and at the end."""
    (comparison,) = compare(trace)
    (entry,) = comparison.entries
    seeds = _count(len(trace.seeds), "seed")
    table = Table(title=f"{comparison.title}, {entry.label}, {seeds}: {comparison.measure}, %")
    table.add_column("task", style="bold")
    for heading in ("when learned", "at the end", "change"):
        table.add_column(heading, justify="right")
    last = entry.learned - 1
    for t in range(entry.learned):
        before, after = entry.mean[t, t], entry.mean[last, t]
        table.add_row(trace.tasks[t], f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}")
    return table


def _cell(entry: Entry, metric: Metric) -> str:
    spread = entry.spread(metric)
    if spread is None:
        return "-"
    mean, std = spread
    return f"{mean:.2f}" + (f" ± {std:.2f}" if len(entry.trace.seeds) > 1 else "")


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")
