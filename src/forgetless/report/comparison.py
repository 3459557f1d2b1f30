"""Runs side by side: the entries of tables, figures and the page, and tables."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from forgetless.methods import METHODS, method_label
from forgetless.report.looks import Look, looks
from forgetless.support.validation import TraceError
from forgetless.trace import (
    INCIDENTAL,
    TRACE_FILE,
    Metric,
    Trace,
    average_accuracy,
    forgetting,
    is_trace,
    load_trace,
    merged_seeds,
    same_experiment,
    tasks_learned,
)
from forgetless.trace.notebook import comparison_html

Array = NDArray[np.float64]
# Setting of a scenario → its name in the field, and which classes compete for a sample.
SETTING_TITLES = {
    "task": ("task-incremental", "A sample's task is known: only the classes of its task compete."),
    "domain": ("domain-incremental", "All tasks have the same classes, and all of them compete."),
    "class": ("class-incremental", "All classes of the tasks learned so far compete."),
}


@final
@dataclass(frozen=True)
class Entry:
    """One experiment: a method with one set of settings, over all its seeds.

    Attributes:
        label: its name among the others, such as "OGD" or "OGD, memory 10".
        look: its colour, dashes and shape.
        trace: its runs as one, with the seeds of all of them.
        parts: the traces themselves.
    """

    label: str
    look: Look
    trace: Trace
    parts: tuple[Trace, ...]

    @property
    def learned(self) -> int:
        """The number of tasks that the seeds that count have learned."""
        return tasks_learned(self.counted)

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
        """Mean and standard deviation of a metric over the seeds; None if no seed has one."""
        values = self.trace.per_seed(metric)
        known = values[np.isfinite(values)]
        return (float(known.mean()), float(known.std())) if len(known) else None

    @property
    def keeps_all_data(self) -> bool:
        """Whether the method's memory is all training data."""
        return self.trace.method in METHODS and METHODS[self.trace.method].keeps_all_data

    @property
    def protects(self) -> bool:
        """Whether the method does anything against forgetting."""
        return self.trace.method not in METHODS or METHODS[self.trace.method].protects

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of the method's memory for a seed at the end; None if the traces do not say."""
        if self.keeps_all_data:
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
        setting: "task", "domain" or "class"; empty where the traces do not say.
        measured_on: the "test" set or a "validation" set.
        tasks: the names of its T tasks.
        entries: one for each experiment.
    """

    scenario: str
    setting: str
    measured_on: str
    tasks: tuple[str, ...]
    entries: tuple[Entry, ...]

    @property
    def title(self) -> str:
        """Scenario and setting: "split-mnist, task-incremental"."""
        known = [SETTING_TITLES[self.setting][0]] if self.setting in SETTING_TITLES else []
        return ", ".join([self.scenario, *known])

    @property
    def measure(self) -> str:
        """The name of the accuracies: "accuracy", or "validation accuracy"."""
        return "accuracy" if self.measured_on == "test" else f"{self.measured_on} accuracy"

    @property
    def learned(self) -> int:
        """The number of tasks that the entry that got furthest has learned."""
        return max(entry.learned for entry in self.entries)

    def _repr_html_(self) -> str:
        rows = []
        for entry in self.entries:
            spreads = (entry.spread(m) for m in (average_accuracy, forgetting))
            cells = ["–" if s is None else f"{s[0]:.2f} ± {s[1]:.2f}" for s in spreads]
            rows.append((entry.label, *cells, f"{len(entry.trace.seeds)}"))
        title = f"{self.title}, {len(self.tasks)} tasks: {self.measure}"
        maps = [(e.label, e.mean.tolist()) for e in self.entries]
        return comparison_html(title, ("method", "A_T, %", "F_T, points", "seeds"), rows, maps)


def compare(traces: Trace | Iterable[Trace]) -> list[Comparison]:
    """Traces side by side, one comparison for each scenario, setting and measure among them.

    Runs of one experiment, which differ in their seeds alone, are one entry. Experiments with one
    method are told apart by what differs: settings, data, model or code.
    """
    groups: dict[tuple[str, str, str, int], list[Trace]] = {}
    for trace in [traces] if isinstance(traces, Trace) else traces:
        setting = str(trace.config.get("setting", ""))
        key = trace.scenario, setting, trace.measured_on, len(trace.tasks)
        groups.setdefault(key, []).append(trace)
    if not groups:
        raise TraceError("there are no runs to compare")
    return [_comparison(*key[:3], group) for key, group in groups.items()]


def run_folder(place: str | os.PathLike[str]) -> Path:
    """A folder, or that of a run's trace file."""
    path = Path(place)
    return path.parent if path.name == TRACE_FILE and path.is_file() else path


def find_traces(folders: Iterable[str | os.PathLike[str]]) -> tuple[list[Trace], list[str]]:
    """The traces in these folders and below, in the order of METHODS, each once.

    Arguments:
        folders: of runs, or above them; a run's trace file stands for its folder.

    Returns:
        the traces, and a sentence for each that cannot be read. If none can, a TraceError.
    """
    found: dict[Path, Trace] = {}
    broken: dict[Path, str] = {}
    for folder in map(run_folder, folders):
        files = [folder / TRACE_FILE] if is_trace(folder) else sorted(folder.rglob(TRACE_FILE))
        odd = {file.absolute(): f"{file} is not a file" for file in files if not file.is_file()}
        broken |= odd
        inside = [file.parent for file in files if file.is_file()]
        if not inside and not odd:
            raise TraceError(f"{folder} holds no trace, and neither do the folders in it")
        read = []
        for path in inside:
            try:
                read.append(load_trace(path))
            except TraceError as error:
                broken[path.resolve()] = str(error)
        for trace in sorted(read, key=_expected):
            found.setdefault(Path(trace.path or folder).resolve(), trace)
    if not found:
        raise TraceError("; ".join(broken.values()))
    return list(found.values()), list(broken.values())


def _expected(trace: Trace) -> tuple[str, int, str]:
    """Runs of one folder in the order of METHODS, others after them."""
    place = list(METHODS).index(trace.method) if trace.method in METHODS else len(METHODS)
    return str(trace.path and trace.path.parent), place, str(trace.path)


def _comparison(
    scenario: str, setting: str, measured_on: str, traces: Sequence[Trace]
) -> Comparison:
    merged: list[list[Trace]] = []
    for trace in traces:
        for parts in merged:
            taken = {seed for part in parts for seed in part.seeds}
            if same_experiment(parts[0], trace) and taken.isdisjoint(trace.seeds):
                parts.append(trace)
                break
        else:
            merged.append([trace])
    firsts = [parts[0] for parts in merged]
    entries = (
        Entry(label, look, merged_seeds(parts), tuple(parts))
        for label, look, parts in zip(_labels(firsts), _looks(firsts), merged, strict=True)
    )
    # A run that was stopped has no names yet for the tasks that it did not reach.
    furthest = max(traces, key=lambda t: int(np.isfinite(t.accuracy).sum(axis=(1, 2)).max()))
    return Comparison(scenario, setting, measured_on, furthest.tasks, tuple(entries))


def _labels(traces: Sequence[Trace]) -> list[str]:
    """The methods' names, with what differs between the runs of one method."""
    labels = []
    for trace in traces:
        rivals = [t for t in traces if t.method == trace.method]
        labels.append(", ".join([_name(trace), *_settings(trace, rivals)]))
    for part in ("scenario", "data", "model", "start", "method"):  # which no setting explains
        labels = _numbered(labels, [t.fingerprint.get(part) for t in traces], part)
    # Two runs of the same experiment with the same seeds: only their folders tell them apart.
    repeated = {label for label in labels if labels.count(label) > 1}
    return [
        f"{label}, {_folder(trace, n)}" if label in repeated else label
        for n, (label, trace) in enumerate(zip(labels, traces, strict=True), 1)
    ]


def _looks(traces: Sequence[Trace]) -> list[Look]:
    families = [str(trace.config.get("method_family", "")) for trace in traces]
    return looks([trace.method for trace in traces], families)


def _name(trace: Trace) -> str:
    """The method's name as people write it; a method that is not in METHODS left its own."""
    return str(trace.config.get("method_label") or method_label(trace.method))


def _settings(trace: Trace, rivals: Sequence[Trace]) -> list[str]:
    """The settings in which a run differs from others of its method."""
    names = [n for n in trace.config if n not in INCIDENTAL | {"method_label"}]
    differing = [n for n in names if any(t.config.get(n) != trace.config[n] for t in rivals)]
    found = []
    for name in differing:
        words, value = name.replace("_", " "), trace.config[name]
        if isinstance(value, bool):
            found.append(words if value else f"not {words}")
        elif value not in (None, ""):
            found.append(f"{words} {value}")
    return found


def _numbered(labels: Sequence[str], values: Sequence[Any], part: str) -> list[str]:
    """Equal labels told apart by the number of their value, if it differs: "SGD, model 2"."""
    if all(isinstance(value, list) for value in values):  # one may have learned fewer tasks
        values = [value[: min(map(len, values))] for value in values]
    found = []
    for label, value in zip(labels, values, strict=True):
        same = [v for la, v in zip(labels, values, strict=True) if la == label]
        distinct = [v for n, v in enumerate(same) if v not in same[:n]]
        number = "" if len(distinct) < 2 else f", {part} {distinct.index(value) + 1}"
        found.append(label + number)
    return found


def _folder(trace: Trace, number: int) -> str:
    if trace.path is None:
        return f"run {number}"
    return f"{trace.path.parent.name}/{trace.path.name}"
