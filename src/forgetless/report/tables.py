"""Tables of runs: on the terminal, as CSV and LaTeX, and as a frame of pandas."""

import csv
import io
from collections.abc import Sequence
from importlib import import_module
from math import isfinite
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from forgetless.report.comparison import Comparison, compare
from forgetless.report.ranking import METRICS, Place, Ranking, per_seed, ranking
from forgetless.support.statistics import DOUBT, Test
from forgetless.support.validation import ConfigError, format_bytes
from forgetless.trace import Trace

Runs = Sequence[Trace] | Comparison | Ranking
_SPECIAL = {character: f"\\{character}" for character in "&%$#_{}"}
_SPECIAL |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
_SPECIAL |= {"±": r"$\pm$", "Δ": r"$\Delta$", "–": "--"}
_LEAST_P = 0.001
_LEAST_WIDTH = 70  # of a table, for its caption


def comparison_table(runs: Runs, *, against: str | None = None, test: Test = "t") -> Table:
    """One row per entry: A_T and F_T with intervals, the difference from the best, bytes, time.

    Arguments:
        runs: traces of one scenario, their comparison or their ranking.
        against, test: as for `ranking`.
    """
    made = _ranking_of(runs, against, test)
    tasks, seeds = _count(len(made.comparison.tasks), "task"), len(made.reference.trace.seeds)
    title = f"{made.comparison.title}: {tasks}, {_count(seeds, 'seed')}"
    # Without frames it fits in 80 columns.
    shape: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    table = Table(title=title, min_width=_LEAST_WIDTH, caption_justify="left", **shape)
    table.add_column("method", style="bold")
    differs = ("Δ", "p") if made.is_tested else ()
    for heading in ("A_T", "F_T", *differs, "stored", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for place in made.places:
        status = place.entry.trace.status
        change = "" if place.difference is None else f"{place.difference.mean:+.2f}"
        tested = (change, _p_text(place.p)) if made.is_tested else ()
        table.add_row(
            place.entry.label + ("" if status == "complete" else f" ({status})"),
            _cell(place, "average_accuracy"),
            _cell(place, "forgetting"),
            *tested,
            _stored(place),
            f"{place.seconds:.1f}",
            style="green" if place.entry is made.reference and len(made.places) > 1 else None,
        )
    table.caption = made.footnote
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


def rows(runs: Runs, *, against: str | None = None, test: Test = "t") -> list[dict[str, Any]]:
    """A row per entry: metrics with intervals, the test against the reference, bytes, seconds.

    An interval is half the 95 % interval of the mean. What there is not is None.
    """
    made = _ranking_of(runs, against, test)
    comparison = made.comparison
    found = []
    for place in made.places:
        row: dict[str, Any] = {
            "scenario": comparison.scenario,
            "setting": comparison.setting,
            "measured_on": comparison.measured_on,
            "tasks": len(comparison.tasks),
            "method": place.entry.label,
            "seeds": len(per_seed(place.entry, METRICS["average_accuracy"])),
        }
        for name, interval in (*place.intervals.items(), ("difference", place.difference)):
            row[name] = None if interval is None else interval.mean
            row[f"{name}_interval"] = None if interval is None else _finite(interval.half)
        row |= {
            "against": made.reference.label,
            "p": _finite(place.p),
            "test": f"{made.test}, Holm over {made.tests}" if made.is_tested else "",
            "bytes": place.entry.memory_bytes,
            "seconds": place.seconds,
        }
        found.append(row)
    return found


def rows_of_seeds(runs: Runs) -> list[dict[str, Any]]:
    """A row per entry and seed: its metrics."""
    found = []
    for place in _ranking_of(runs, None, "t").places:
        values = {name: per_seed(place.entry, metric) for name, metric in METRICS.items()}
        for seed in values["average_accuracy"]:
            own = {name: of[seed] for name, of in values.items()}
            found.append({"method": place.entry.label, "seed": seed, **own})
    return found


def as_csv(runs: Runs, *, against: str | None = None, test: Test = "t") -> str:
    """The `rows` as CSV; what there is not is empty."""
    found = rows(runs, against=against, test=test)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def as_frame(
    runs: Runs, *, against: str | None = None, test: Test = "t", seeds: bool = False
) -> Any:
    """The `rows` as a DataFrame of pandas.

    Arguments:
        seeds: a row for every seed, in place of means.
    """
    try:
        pandas = import_module("pandas")
    except ImportError as error:
        raise ConfigError("a frame needs pandas: pip install 'forgetless[pandas]'") from error
    found = rows_of_seeds(runs) if seeds else rows(runs, against=against, test=test)
    return pandas.DataFrame(found)


def as_latex(runs: Runs, *, against: str | None = None, test: Test = "t") -> str:
    """A table for papers, which needs the package booktabs.

    Bold: the highest A_T, and those that the test does not tell apart from it.
    """
    made = _ranking_of(runs, against, test)
    tested = made.is_tested
    headings = ["Method", r"$A_T$ (\%)", "$F_T$", *([r"$\Delta$", "$p$"] if tested else [])]
    headings += ["Stored", "Time (s)"]
    body = [_latex_row(headings), r"\midrule"]
    for place in made.places:
        accuracy = _math(_cell(place, "average_accuracy"))
        if made.is_best and len(made.places) > 1 and _is_level(place, made):
            accuracy = rf"{{\boldmath {accuracy}}}"
        cells = [
            _escaped(place.entry.label),
            accuracy,
            _math(_cell(place, "forgetting")),
            *([_math(_difference(place)), _math(_p_text(place.p))] if tested else []),
            _escaped(_stored(place)),
            f"{place.seconds:.1f}",
        ]
        body.append(_latex_row(cells))
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_caption(made)}}}",
        rf"  \begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}",
        *(f"    {line}" for line in (r"\toprule", *body, r"\bottomrule")),
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _is_level(place: Place, made: Ranking) -> bool:
    """Whether an entry is the best, or not told apart from it."""
    return place.entry is made.reference or place.p >= DOUBT


def _latex_row(cells: Sequence[str]) -> str:
    return rf"{' & '.join(cells)} \\"


def _caption(made: Ranking) -> str:
    tasks, seeds = _count(len(made.comparison.tasks), "task"), _count(made.seeds, "seed")
    text = f"{made.comparison.title}, {tasks}, {seeds}. {made.footnote}"
    if made.is_tested and made.is_best:
        text += f" Bold: the highest, and what is not told apart from it (p ≥ {DOUBT:g})."
    latex = _escaped(text).replace(r"A\_T", "$A_T$").replace(r"F\_T", "$F_T$")
    return latex.replace("p: ", "$p$: ").replace("p ≥ ", r"$p \ge$ ").replace("95 ", "95~")


def _ranking_of(runs: Runs, against: str | None, test: Test) -> Ranking:
    return runs if isinstance(runs, Ranking) else ranking(runs, against=against, test=test)


def _cell(place: Place, name: str) -> str:
    interval = place.intervals[name]
    return "–" if interval is None else interval.text


def _difference(place: Place) -> str:
    if place.difference is None:
        return ""
    return f"{'+' if place.difference.mean > 0 else ''}{place.difference.text}"


def _p_text(p: float) -> str:
    """A p-value for people."""
    if not isfinite(p):
        return ""
    return f"<{_LEAST_P}" if p < _LEAST_P else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def _stored(place: Place) -> str:
    """The bytes of a seed's memory."""
    size = place.entry.memory_bytes
    if place.entry.keeps_all_data:
        return "all data"
    return "–" if size is None else format_bytes(size)


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _math(text: str) -> str:
    """A number, or two with ± between, as LaTeX."""
    if not text or text == "–":
        return text.replace("–", "--")
    return f"${text}$".replace("±", r"\pm")


def _escaped(text: str) -> str:
    """Text as LaTeX."""
    return "".join(_SPECIAL.get(character, character) for character in text)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")
