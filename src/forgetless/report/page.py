"""The report of runs as one HTML file that opens from disk."""

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgetless.launch.rebuild import FromScript
from forgetless.launch.runs import resolve, setting_fields
from forgetless.report.analysis import Analysis, cached_analysis, known_analysis
from forgetless.report.comparison import (
    SETTING_TITLES,
    Array,
    Comparison,
    Entry,
    compare,
)
from forgetless.report.document import asset, build_document
from forgetless.support.files import write_atomically
from forgetless.support.plugins import is_in_file
from forgetless.support.progress import bar_on_terminal
from forgetless.support.validation import ConfigError, ForgetlessError, flag
from forgetless.trace import INCIDENTAL, Trace, average_accuracy, forgetting, nulls

_PROGRAM = ("summary", "accuracy", "overlap", "analysis", "reasons", "advice", "main")
_SHARES = (0.9, 0.95, 0.99)  # of variance, for which the page offers a command
Runs = Trace | Comparison | Iterable[Trace] | Sequence[Comparison]
Analyses = Mapping[str, Analysis]  # by the label of the entry

PAGE = "report.html"  # beside the runs

_MOST_OF_IT = 0.8  # share of a task's loss that the named stretch of the run accounts for
_NOTHING = 0.05  # points: less is shown as 0.0
# Settings that belong to a method, or change no result.
_OF_METHODS = INCIDENTAL | {
    "method", "method_from", "method_label", "storage", "budget", "unprotected"
}  # fmt: skip
_NAMES = 40  # characters of a label that a sentence has room for


def write_page(
    runs: Runs,
    path: str | os.PathLike[str],
    analyses: Sequence[Analyses] = (),
    *,
    command: str = "",
    broken: Sequence[str] = (),
) -> Path:
    """Write the report of some runs; see `build_page`."""
    file = Path(path)
    text = build_page(runs, analyses, command=command, broken=broken)
    write_atomically(file, lambda new: new.write_text(text, "utf-8"))
    return file


def build_page(
    runs: Runs,
    analyses: Sequence[Analyses] = (),
    *,
    command: str = "",
    broken: Sequence[str] = (),
) -> str:
    """The report of some runs as the text of an HTML page that needs nothing else.

    Arguments:
        runs: traces, or comparisons made from them; at least one.
        analyses: for each comparison the known analyses, by the label of the entry; panels
            without their numbers are left out, with a sentence.
        command: the command that made the page, for its foot.
        broken: a sentence for each run that could not be read.
    """
    given = [runs] if isinstance(runs, Trace | Comparison) else list(runs)
    comparisons = [r for r in given if isinstance(r, Comparison)]
    traces = [r for r in given if isinstance(r, Trace)]
    if traces or not comparisons:
        comparisons += compare(traces)
    known = [*analyses, *({} for _ in comparisons[len(analyses) :])]
    content = {
        "command": command,
        "broken": list(broken),
        "shares": list(_SHARES),
        "groups": [_group(c, a) for c, a in zip(comparisons, known, strict=True)],
    }
    program = [asset(f"assets/{name}.js") for name in _PROGRAM]
    return build_document("Forgetting report", asset("assets/report.html"), content, program)


def _group(comparison: Comparison, analyses: Analyses) -> dict[str, Any]:
    return {
        "scenario": comparison.title,
        "setting": SETTING_TITLES[comparison.setting][1]
        if comparison.setting in SETTING_TITLES
        else "",
        "measure": comparison.measure,
        "tasks": list(comparison.tasks),
        "learned": comparison.learned,
        "headline": headline(comparison),
        "folders": _folders(comparison),
        "entries": [_entry(e, analyses.get(e.label)) for e in comparison.entries],
    }


def _entry(entry: Entry, analysis: Analysis | None) -> dict[str, Any]:
    trace = entry.trace
    seeds = seeds_setting(trace.seeds)
    average, forgotten = map(entry.spread, (average_accuracy, forgetting))
    return {
        "label": entry.label,
        "colour": entry.look.place,
        "symbol": entry.look.symbol,
        "dash": " ".join(map(str, entry.look.dash)),
        "status": trace.status,
        "learned": entry.learned,
        "seeds": list(trace.seeds),
        "accuracy": nulls(trace.accuracy.tolist()),
        "mean": nulls(entry.mean.tolist()),
        "std": nulls(entry.std.tolist()),
        "average": average,
        "forgetting": forgotten,
        "memory_bytes": entry.memory_bytes,
        "everything": entry.keeps_all_data,
        "seconds": trace.timings.get("total"),
        "command": command_line(trace.config, seeds=seeds),
        "protect": [
            command_line(trace.config, method="pca-ogd", variance=share, seeds=seeds)
            for share in _SHARES
        ],
        "hold": [
            command_line(trace.config, method="kron-ogd", energy=share, seeds=seeds)
            for share in _SHARES
        ],
        "config": {k: str(v) for k, v in trace.config.items()},
        "versions": dict(trace.versions),
        "analysis": None if analysis is None else nulls(analysis.plain()),
    }


def _folders(comparison: Comparison) -> list[str]:
    """The folders of the runs; the parent of several in one place."""
    paths = [part.path for e in comparison.entries for part in e.parts if part.path is not None]
    parents = {path.parent for path in paths}
    together = len(paths) > 1 and len(parents) == 1
    return sorted(map(str, parents if together else paths))


def headline(comparison: Comparison) -> str:
    """One or two sentences: which method kept most, which task suffered most, and when."""
    entries = comparison.entries
    learned = comparison.learned
    if learned == 0:
        return "No task was learned to its end, so there is nothing to compare yet."
    sentence = _of_one(entries[0]) if len(entries) == 1 else _of_several(entries)
    if learned < len(comparison.tasks):
        sentence += f" The runs stopped after {learned} of {len(comparison.tasks)} tasks."
    if comparison.measured_on != "test":
        sentence += f" This is {comparison.measure}."
    return sentence


def worst_task(entry: Entry) -> tuple[int, float, int, int] | None:
    """The task that lost most from its best accuracy: (task, points, from, to), from 0.

    `from` and `to` are the ends of the shortest stretch of the run in which most of it was lost.
    """
    learned = entry.learned
    if learned < 2:
        return None
    matrix = entry.mean[:learned, :learned]
    drops = [float(matrix[s:, s].max() - matrix[-1, s]) for s in range(learned - 1)]
    task = int(np.argmax(drops))
    if drops[task] < _NOTHING:
        return None
    start, stop = _stretch(matrix[task:, task], _MOST_OF_IT * drops[task])
    return task, drops[task], task + start, task + stop


def command_line(config: Mapping[str, Any], **changed: Any) -> str | None:
    """The `forgetless run` that has these settings; None for a run that a script made.

    Arguments:
        config: of a trace.
        changed: settings with other values.
    """
    wanted = {n: str(v) if n in ("scenario", "method") else v for n, v in config.items()} | changed
    if not {"scenario", "method"} <= set(wanted) <= set(setting_fields()):
        return None
    if any(is_in_file(str(wanted.get(name))) for name in ("scenario", "method", "model")):
        return None  # no file is executed because a trace names it
    try:
        usual = resolve(wanted["scenario"], wanted["method"])
        made = resolve(**wanted)  # type: ignore[arg-type]
    except ConfigError:
        return None
    words = ["forgetless", "run", made.scenario, "--method", made.method]
    usually = usual.as_dict() | {"seeds": usual.seeds}
    for name, value in (made.as_dict() | {"seeds": made.seeds}).items():
        if value is None or value == usually.get(name):
            continue
        written = flag(name)
        if isinstance(value, bool):
            words.append(written if value else f"--no-{written[2:]}")
        else:
            words += [written, str(value)]
    return shlex.join(words)


def _of_one(entry: Entry) -> str:
    name = _name(entry)
    average, forgotten = _means(entry)
    if entry.learned == 1:
        return f"{name} learned one task to {average:.1f} %; there was nothing to forget yet."
    sentence = f"{name} forgot {forgotten:.1f} points on average and ended at {average:.1f} %"
    return f"{sentence}{_suffering(entry)}."


def _of_several(entries: tuple[Entry, ...]) -> str:
    able = [e for e in entries if not e.keeps_all_data and e.learned] or list(entries)
    best = max(able, key=lambda e: _means(e)[0])
    name, (average, forgotten) = _name(best), _means(best)
    if not best.protects:
        start = "No method did better than" if any(e.protects for e in able) else "Best was"
        return f"{start} {name}, at {average:.1f} %{_suffering(best)}."
    rivals = [e for e in able if e is not best and _trained_alike(best, e)]
    plain = [e for e in rivals if not e.protects]
    if not rivals or not (plain or all(e.protects for e in able)):
        sentence = f"{name} ended highest, at {average:.1f} %, but no plain run has its settings"
        return f"{sentence} of training, so how much it owes to them is unknown{_suffering(best)}."
    base = plain[0] if plain else min(rivals, key=lambda e: _means(e)[0])
    kept, gained = _means(base)[1] - forgotten, average - _means(base)[0]
    if kept >= _NOTHING:
        sentence = f"{name} kept {kept:.1f} points that {_name(base)} lost"
    else:
        sentence = f"{name} ended {gained:.1f} points above {_name(base)}"
    return f"{sentence}{_suffering(base)}."


def _trained_alike(one: Entry, other: Entry) -> bool:
    """Whether two runs differ in the method alone, not in the optimizer or the model."""
    here, there = one.trace, other.trace
    shared = (here.config.keys() & there.config.keys()) - _OF_METHODS
    same = all(here.config[name] == there.config[name] for name in shared)
    models = [(here.fingerprint.get(p), there.fingerprint.get(p)) for p in ("model", "start")]
    return same and all(a == b or None in (a, b) for a, b in models)


def _suffering(entry: Entry) -> str:
    worst = worst_task(entry)
    if worst is None:
        return ", and no task suffered" if entry.learned > 1 else ""
    task, _, start, stop = worst
    between = f"between tasks {start + 1} and {stop + 1}"
    return f"; task {task + 1} suffered most, {between}"


def _stretch(accuracy: Array, lost: float) -> tuple[int, int]:
    """The shortest stretch of a curve over which `lost` is lost."""
    n = len(accuracy)
    for length in range(1, n):
        falls = accuracy[: n - length] - accuracy[length:]
        if falls.max() >= lost:
            start = int(falls.argmax())
            return start, start + length
    return 0, n - 1


def _means(entry: Entry) -> tuple[float, float]:
    spreads = (entry.spread(average_accuracy), entry.spread(forgetting))
    average, forgotten = (float("nan") if s is None else s[0] for s in spreads)
    return average, forgotten


def _name(entry: Entry) -> str:
    name = entry.label
    return name if len(name) <= _NAMES else f"{name[: _NAMES - 1]}…"


def seeds_setting(seeds: Sequence[int]) -> str:
    """Seeds in the format of the command line."""
    if list(seeds) == list(range(len(seeds))):
        return str(len(seeds))
    return ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")


def make_report(
    traces: Sequence[Trace],
    page: Path,
    *,
    analyse: bool = False,
    given: FromScript = (None, None),
    data: Path | None = None,
    command: str = "",
    broken: Sequence[str] = (),
) -> list[str]:
    """Write the page of some runs, even if an analysis is interrupted.

    Arguments:
        given: tasks and model of the runs that a script made.

    Returns:
        its headlines, and a sentence for each run that could not be analysed or read.
    """
    comparisons = compare(traces)
    failures: list[str] = []
    analyses: list[dict[str, Analysis]] = [{} for _ in comparisons]
    try:
        for comparison, found in zip(comparisons, analyses, strict=True):
            for entry in comparison.entries:
                with bar_on_terminal(f"why {entry.label} forgot"):
                    known = _analysis(entry, analyse, given, data, failures)
                if known is not None:
                    found[entry.label] = known
    finally:
        write_page(comparisons, page, analyses, command=command, broken=broken)
    one = len(comparisons) == 1
    headlines = [headline(c) if one else f"{c.title}: {headline(c)}" for c in comparisons]
    return [*headlines, *failures, *(f"Left out: {sentence}" for sentence in broken)]


def _analysis(
    entry: Entry, analyse: bool, given: FromScript, data: Path | None, failures: list[str]
) -> Analysis | None:
    """The analysis of the first trace of an entry that has one, or else a new one if asked."""
    for part in entry.parts:
        known = known_analysis(part)
        if known is not None:
            return known
    if not analyse:
        return None
    trace = entry.parts[0]
    tasks = given[0] if "scenario_from" in trace.config else None
    model = given[1] if "model_from" in trace.config else None
    try:
        return cached_analysis(trace, tasks=tasks, model=model, data=data)
    except ForgetlessError as error:
        failures.append(f"{entry.label} could not be analysed: {error}")
        return None
