"""Tables of results for the terminal."""

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from forgetless.trace import Metric, Trace, metrics


def comparison_table(traces: Sequence[Trace]) -> Table:
    """One row a method: A_T, F_T and BWT over the seeds, and the time it took."""
    first = traces[0]
    many = len(first.seeds) > 1
    table = Table(title=f"{first.scenario}: {_count(len(first.tasks), 'task')}, {_seeds(first)}")
    table.add_column("method", style="bold")
    for heading in ("A_T", "F_T", "BWT", "seconds"):
        table.add_column(heading, justify="right")
    best = max(traces, key=lambda t: _mean(t, metrics.average_accuracy), default=None)
    for trace in traces:
        table.add_row(
            trace.method + ("" if trace.status == "complete" else f" ({trace.status})"),
            _cell(trace, metrics.average_accuracy, many),
            _cell(trace, metrics.forgetting, many),
            _cell(trace, metrics.backward_transfer, many),
            f"{trace.timings.get('total', 0.0):.1f}",
            style="green" if trace is best and len(traces) > 1 else None,
        )
    table.caption = (
        "A_T: mean accuracy on all tasks at the end, %. F_T: mean drop from the best, points."
    )
    return table


def task_table(trace: Trace) -> Table:
    """Accuracy on each task, right after it was learned and at the end."""
    seeds = trace.finished if trace.finished.any() else np.ones(len(trace.seeds), bool)
    accuracy = trace.accuracy[seeds].mean(0)
    rows = np.isfinite(np.diagonal(accuracy))
    table = Table(title=f"{trace.scenario}, {trace.method}, {_seeds(trace)}: accuracy, %")
    table.add_column("task", style="bold")
    for heading in ("when learned", "at the end", "change"):
        table.add_column(heading, justify="right")
    last = int(rows.sum()) - 1
    for t in range(last + 1):
        before, after = accuracy[t, t], accuracy[last, t]
        table.add_row(trace.tasks[t], f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}")
    return table


def _mean(trace: Trace, metric: Metric) -> float:
    values = trace.per_seed(metric)
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("-inf")


def _cell(trace: Trace, metric: Metric, many: bool) -> str:
    values = trace.per_seed(metric)
    known = values[np.isfinite(values)]
    if not len(known):
        return "-"
    return f"{known.mean():.2f}" + (f" ± {known.std():.2f}" if many else "")


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def _seeds(trace: Trace) -> str:
    return _count(len(trace.seeds), "seed")
