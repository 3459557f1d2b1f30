"""One HTML file with everything in it: style, charting library, program and numbers."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from forgetless.report import palette
from forgetless.report.analysis import Analysis
from forgetless.report.comparison import SETTING_TITLES, Comparison, Entry, compare
from forgetless.report.page.words import command_line, headline, seeds_setting
from forgetless.support.files import write_atomically
from forgetless.trace import Trace, metrics, nulls

_LIBRARY = ("vendor/d3.min.js", "vendor/plot.umd.min.js")
_PROGRAM = (
    "base.js", "panel.js", "summary.js", "accuracy.js", "overlap.js", "analysis.js", "reasons.js",
    "advice.js", "main.js",
)  # fmt: skip
# Characters that would end or hide a script element, or a line of it, inside JSON.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_SHARES = (0.9, 0.95, 0.99)  # of variance, for which the page offers a command
Runs = Trace | Comparison | Iterable[Trace] | Sequence[Comparison]
Analyses = Mapping[str, Analysis]  # by the label of the entry


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
    data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Template(_asset("assets/page.html")).substitute(
        style=_asset("assets/style.css"),
        light=_variables(palette.LIGHT),
        dark=_variables(palette.DARK),
        data=data.translate({ord(unsafe): safe for unsafe, safe in _UNSAFE.items()}),
        licences=_licences(),
        library="\n".join(f"<script>{_asset(name)}</script>" for name in _LIBRARY),
        program="\n".join(_asset(f"assets/{name}") for name in _PROGRAM),
    )


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
    average, forgetting = map(entry.spread, (metrics.average_accuracy, metrics.forgetting))
    return {
        "label": entry.label,
        "colour": entry.place % len(palette.LIGHT),
        "symbol": palette.symbol(entry.place),
        "dash": " ".join(map(str, palette.dash(entry.place))),
        "status": trace.status,
        "learned": entry.learned,
        "seeds": list(trace.seeds),
        "accuracy": nulls(trace.accuracy.tolist()),
        "mean": nulls(entry.mean.tolist()),
        "std": nulls(entry.std.tolist()),
        "average": average,
        "forgetting": forgetting,
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


def _variables(colours: Sequence[str]) -> str:
    """Colours as variables of the style sheet."""
    return " ".join(f"--c{n}: {colour};" for n, colour in enumerate(colours))


@cache
def _asset(name: str) -> str:
    return files("forgetless.report.page").joinpath(name).read_text("utf-8")


@cache
def _licences() -> str:
    texts = (_asset(f"vendor/{name}.LICENSE").strip() for name in ("d3", "plot"))
    return "\n\n".join(texts).replace("--", "‐‐")
