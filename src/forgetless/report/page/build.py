"""One HTML file with everything in it: style, charting library, program and numbers."""

import json
import os
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template

from forgetless.report.comparison import Comparison, compare
from forgetless.report.page.content import Analyses, page_content
from forgetless.support.files import write_atomically
from forgetless.trace import Trace

_LIBRARY = ("vendor/d3.min.js", "vendor/plot.umd.min.js")
_PROGRAM = (
    "base.js", "panel.js", "summary.js", "what.js", "overlap.js", "reasons.js", "why.js", "todo.js",
    "main.js",
)  # fmt: skip
# What would end or hide a script element, or a line of it, inside JSON.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
Runs = Trace | Comparison | Iterable[Trace] | Sequence[Comparison]


def write_page(
    runs: Runs,
    path: str | os.PathLike[str],
    analyses: Sequence[Analyses] = (),
    *,
    command: str = "",
) -> Path:
    """Write the report of some runs; see `build_page`."""
    file = Path(path)
    text = build_page(runs, analyses, command=command)
    write_atomically(file, lambda new: new.write_text(text, "utf-8"))
    return file


def build_page(
    runs: Runs,
    analyses: Sequence[Analyses] = (),
    *,
    command: str = "",
) -> str:
    """The report of some runs as the text of an HTML page that needs nothing else.

    Arguments:
        runs: traces, or comparisons made from them; at least one.
        analyses: for each comparison what is known of the reasons, by the label of the entry;
            panels without their numbers are left out, with a sentence.
        command: how the page was made, for its foot.
    """
    given = [runs] if isinstance(runs, Trace | Comparison) else list(runs)
    comparisons = [r for r in given if isinstance(r, Comparison)]
    traces = [r for r in given if isinstance(r, Trace)]
    if traces or not comparisons:
        comparisons += compare(traces)
    known = [*analyses, *({} for _ in comparisons[len(analyses) :])]
    content = page_content(comparisons, known, command)
    data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _template().substitute(
        style=_asset("assets/style.css"),
        data=data.translate({ord(unsafe): safe for unsafe, safe in _UNSAFE.items()}),
        licences=_licences(),
        library="\n".join(f"<script>{_asset(name)}</script>" for name in _LIBRARY),
        program="\n".join(_asset(f"assets/{name}") for name in _PROGRAM),
    )


@cache
def _asset(name: str) -> str:
    return files("forgetless.report.page").joinpath(name).read_text("utf-8")


@cache
def _template() -> Template:
    return Template(_asset("assets/page.html"))


@cache
def _licences() -> str:
    texts = (_asset(f"vendor/{name}.LICENSE").strip() for name in ("d3", "plot"))
    return "\n\n".join(texts).replace("--", "‐‐")
