"""The numbers of the page: comparisons as plain values, ready for JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from forgetless.report.analysis import Analysis
from forgetless.report.comparison import JOINT, Comparison, Entry, shown
from forgetless.report.page.words import command, headline
from forgetless.trace import metrics, nulls

_SHARES = (0.9, 0.95, 0.99)  # of variance, for which the page offers a command
Analyses = Mapping[str, Analysis]  # by the label of the entry


def page_content(
    comparisons: Sequence[Comparison], analyses: Sequence[Analyses], command_line: str
) -> dict[str, Any]:
    """Everything that the page shows."""
    return {
        "command": command_line,
        "shares": list(_SHARES),
        "groups": [_group(c, a) for c, a in zip(comparisons, analyses, strict=True)],
    }


def _group(comparison: Comparison, analyses: Analyses) -> dict[str, Any]:
    return {
        "scenario": comparison.scenario,
        "tasks": list(comparison.tasks),
        "learned": comparison.learned,
        "headline": headline(comparison),
        "folders": _folders(comparison),
        "entries": [_entry(e, analyses.get(e.label)) for e in comparison.entries],
    }


def _entry(entry: Entry, analysis: Analysis | None) -> dict[str, Any]:
    trace = entry.trace
    return {
        "label": shown(entry.label),
        "method": trace.method,
        "status": trace.status,
        "learned": entry.learned,
        "seeds": list(trace.seeds),
        "accuracy": nulls(trace.accuracy.tolist()),
        "mean": nulls(entry.mean.tolist()),
        "std": nulls(entry.std.tolist()),
        "average": _spread(entry, metrics.average_accuracy),
        "forgetting": _spread(entry, metrics.forgetting),
        "memory": entry.memory_bytes,
        "everything": trace.method == JOINT,
        "seconds": trace.timings.get("total"),
        "command": command(trace.config),
        "protect": [
            command(trace.config, method="pca-ogd", variance=share, seeds=_seeds(trace.seeds))
            for share in _SHARES
        ],
        "config": {k: str(v) for k, v in trace.config.items()},
        "versions": dict(trace.versions),
        "analysis": None if analysis is None else nulls(analysis.plain()),
    }


def _spread(entry: Entry, metric: Any) -> list[float] | None:
    found = entry.spread(metric)
    return None if found is None else list(found)


def _seeds(seeds: Sequence[int]) -> str:
    counted = list(seeds) == list(range(len(seeds)))
    return str(len(seeds)) if counted else ",".join(map(str, seeds)) + ("," * (len(seeds) == 1))


def _folders(comparison: Comparison) -> list[str]:
    """Where the runs are; of several in one place, the place."""
    paths = [part.path for e in comparison.entries for part in e.parts if part.path is not None]
    parents = {path.parent for path in paths}
    together = len(paths) > 1 and len(parents) == 1
    return sorted(map(str, parents if together else paths))
