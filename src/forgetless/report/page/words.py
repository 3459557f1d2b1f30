"""The words of the page: the sentence at its top, and commands to copy."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forgetless.launch.config import resolve, setting_fields
from forgetless.report.comparison import Array, Comparison, Entry
from forgetless.support.errors import ConfigError
from forgetless.support.options import flag
from forgetless.support.plugins import is_in_file
from forgetless.trace import INCIDENTAL, metrics

_MOST_OF_IT = 0.8  # share of a task's loss that the named stretch of the run accounts for
_NOTHING = 0.05  # points: less is shown as 0.0
# Settings that belong to a method, or change no result.
_OF_METHODS = INCIDENTAL | {
    "method", "method_from", "method_label", "storage", "budget", "unprotected"
}  # fmt: skip
_NAMES = 40  # characters of a label that a sentence has room for


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
    spreads = (entry.spread(metrics.average_accuracy), entry.spread(metrics.forgetting))
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
