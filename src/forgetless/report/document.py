"""An HTML page that opens from disk and needs nothing else: style, charting library, program."""

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

from forgetless.report.looks import DARK, LIGHT

_LIBRARY = ("vendor/d3.min.js", "vendor/plot.umd.min.js")
# Characters that would end or hide a script element, or a line of it, inside JSON.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def build_document(
    title: str, body: str, content: Any, program: Sequence[str], style: str = ""
) -> str:
    """The text of a page.

    Arguments:
        title: of the window.
        body: the page's elements, which the program fills.
        content: what it fills them with; as JSON.
        program: its parts, in order, after `assets/base.js` and `assets/panel.js`.
        style: rules besides those of all pages.
    """
    data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Template(asset("assets/document.html")).substitute(
        title=title,
        body=body.strip(),
        style=asset("assets/style.css") + style,
        light=_variables(LIGHT),
        dark=_variables(DARK),
        data=data.translate({ord(unsafe): safe for unsafe, safe in _UNSAFE.items()}),
        licences=_licences(),
        library="\n".join(f"<script>{asset(name)}</script>" for name in _LIBRARY),
        program="\n".join([asset("assets/base.js"), asset("assets/panel.js"), *program]),
    )


@cache
def asset(name: str, package: str = "forgetless.report") -> str:
    """The text of a file that comes with a package."""
    return files(package).joinpath(name).read_text("utf-8")


def _variables(colours: Sequence[str]) -> str:
    """Colours as variables of the style sheet."""
    return " ".join(f"--c{n}: {colour};" for n, colour in enumerate(colours))


@cache
def _licences() -> str:
    texts = (asset(f"vendor/{name}.LICENSE").strip() for name in ("d3", "plot"))
    return "\n\n".join(texts).replace("--", "‐‐")
