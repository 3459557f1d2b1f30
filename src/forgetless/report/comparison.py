"""Runs side by side: what tables, figures and the report page are made from."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from forgetless.launch.config import unused_settings
from forgetless.support.errors import TraceError
from forgetless.trace import Metric, Trace, is_trace, load_trace, merged_seeds, metrics
from forgetless.trace.notebook import comparison_html

Array = NDArray[np.float64]
# Settings that do not decide what a seed learns: runs that differ in nothing else are one entry.
_INCIDENTAL = frozenset({"seeds", "device", "seeds_together"})
JOINT = "joint"  # sees all data again, so that it has no memory to speak of
# The methods from the plainest on: the order in which people expect them, where none is given.
_ORDER = ("sgd", JOINT, "ewc", "a-gem", "gem", "gem-nt", "ogd", "pca-ogd")


@final
@dataclass(frozen=True)
class Entry:
    """A method with one set of settings, over all its seeds.

    Attributes:
        label: what it is called beside the others.
        trace: its runs as one, with the seeds of all of them.
        parts: the traces themselves.
    """

    label: str
    trace: Trace
    parts: tuple[Trace, ...]

    @property
    def learned(self) -> int:
        """How many tasks the seeds that count have learned."""
        own = np.isfinite(np.diagonal(self.counted, axis1=1, axis2=2))
        known = np.append(own.all(axis=0), False)
        return int(np.argmin(known))

    @property
    def counted(self) -> Array:
        """The accuracy of the seeds that count, (S', T, T): the finished ones if there are any."""
        finished = self.trace.finished
        return self.trace.accuracy[finished] if finished.any() else self.trace.accuracy

    @property
    def mean(self) -> Array:
        """The accuracy after each task on each task, mean over the seeds that count, (T, T)."""
        return np.asarray(self.counted.mean(0))

    @property
    def std(self) -> Array:
        """Its (population) standard deviation over these seeds, (T, T)."""
        return np.asarray(self.counted.std(0))

    def spread(self, metric: Metric) -> tuple[float, float] | None:
        """Mean and standard deviation of a metric over the seeds, or None if no seed has one."""
        values = self.trace.per_seed(metric)
        known = values[np.isfinite(values)]
        return (float(known.mean()), float(known.std())) if len(known) else None

    @property
    def memory_bytes(self) -> int | None:
        """What the method remembers for a seed at the end; None where the traces do not say."""
        if self.trace.method == JOINT:
            return None
        sizes = [part.memory_bytes(seed) for part in self.parts for seed in part.seeds]
        known = [size for size in sizes if size is not None]
        return max(known) if known else None


@final
@dataclass(frozen=True)
class Comparison:
    """Runs of one scenario side by side.

    Attributes:
        scenario: its name.
        tasks: the names of its T tasks.
        entries: one for each method and set of settings.
    """

    scenario: str
    tasks: tuple[str, ...]
    entries: tuple[Entry, ...]

    @property
    def learned(self) -> int:
        """How many tasks the entry that got furthest has learned."""
        return max(entry.learned for entry in self.entries)

    def _repr_html_(self) -> str:
        rows = []
        for entry in self.entries:
            spreads = (entry.spread(m) for m in (metrics.average_accuracy, metrics.forgetting))
            cells = ["–" if s is None else f"{s[0]:.2f} ± {s[1]:.2f}" for s in spreads]
            rows.append((shown(entry.label), *cells, f"{len(entry.trace.seeds)}"))
        title = f"{self.scenario}, {len(self.tasks)} tasks"
        maps = [(shown(e.label), e.mean.tolist()) for e in self.entries]
        return comparison_html(title, ("method", "A_T, %", "F_T, points", "seeds"), rows, maps)


def compare(traces: Trace | Iterable[Trace]) -> list[Comparison]:
    """Traces side by side, one comparison for each scenario among them.

    Runs of one method that differ only in their seeds are one entry; runs of one method with
    different settings are told apart by these settings, as far as the method uses them.
    """
    groups: dict[tuple[str, int], list[Trace]] = {}
    for trace in [traces] if isinstance(traces, Trace) else traces:
        groups.setdefault((trace.scenario, len(trace.tasks)), []).append(trace)
    if not groups:
        raise TraceError("there are no runs to compare")
    return [_comparison(scenario, group) for (scenario, _), group in groups.items()]


def find_traces(folders: Iterable[str | os.PathLike[str]]) -> list[Trace]:
    """The traces in these folders and below, each once."""
    found: dict[Path, Trace] = {}
    for folder in map(Path, folders):
        inside = [folder] if is_trace(folder) else sorted(_records(folder), key=_expected)
        if not inside:
            raise TraceError(f"{folder} holds no trace, and neither do the folders in it")
        for path in inside:
            if path.resolve() not in found:
                found[path.resolve()] = load_trace(path)
    return list(found.values())


def shown(label: str) -> str:
    """A label as people write it: acronyms of methods in capitals."""
    method, comma, settings = label.partition(",")
    acronym = method in _ORDER and method != JOINT
    return (method.upper() if acronym else method) + comma + settings


def _records(folder: Path) -> list[Path]:
    return [file.parent for file in folder.rglob("trace.json") if file.is_file()]


def _expected(folder: Path) -> tuple[str, int, str]:
    """Folders of one place in the order of the methods that they are named after."""
    name = folder.name
    place = _ORDER.index(name) if name in _ORDER else len(_ORDER)
    return str(folder.parent), place, name


def _comparison(scenario: str, traces: Sequence[Trace]) -> Comparison:
    merged: list[list[Trace]] = []
    for trace in traces:
        for parts in merged:
            if _belongs(trace, parts):
                parts.append(trace)
                break
        else:
            merged.append([trace])
    labels = _labels([parts[0] for parts in merged])
    entries = (
        Entry(label, merged_seeds(parts), tuple(parts))
        for label, parts in zip(labels, merged, strict=True)
    )
    # A run that was stopped has no names yet for the tasks that it did not come to.
    furthest = max(traces, key=lambda t: int(np.isfinite(t.accuracy).sum(axis=(1, 2)).max()))
    return Comparison(scenario, furthest.tasks, tuple(entries))


def _belongs(trace: Trace, parts: Sequence[Trace]) -> bool:
    """Whether a trace is more seeds of the same."""
    first = parts[0]
    taken = {seed for part in parts for seed in part.seeds}
    same = first.method == trace.method and _settings(first) == _settings(trace)
    return same and taken.isdisjoint(trace.seeds)


def _settings(trace: Trace) -> dict[str, Any]:
    """What decides the results; None in the place of what the method does not use."""
    unused = unused_settings(trace.config)
    settings = {key: None if key in unused else value for key, value in trace.config.items()}
    return {key: value for key, value in settings.items() if key not in _INCIDENTAL}


def _labels(traces: Sequence[Trace]) -> list[str]:
    """The methods' names, with the settings in which runs of one method differ."""
    labels = []
    for trace in traces:
        rivals = [t for t in traces if t.method == trace.method]
        mine = _settings(trace)
        others = [_settings(t) for t in rivals]
        differing = [k for k, v in mine.items() if any(o.get(k, v) != v for o in others)]
        settings = [f"{k.replace('_', ' ')} {mine[k]}" for k in differing if mine[k] is not None]
        labels.append(", ".join([trace.method, *settings]))
    # Two runs of the same thing with the same seeds: only their folders tell them apart.
    repeated = {label for label in labels if labels.count(label) > 1}
    return [
        f"{label}, {_place(trace, n)}" if label in repeated else label
        for n, (label, trace) in enumerate(zip(labels, traces, strict=True), 1)
    ]


def _place(trace: Trace, number: int) -> str:
    if trace.path is None:
        return f"run {number}"
    return f"{trace.path.parent.name}/{trace.path.name}"
