"""Results in a notebook: small HTML tables without anything to load."""

import math
from collections.abc import Sequence
from html import escape

_MOST_TASKS = 20  # a larger matrix is not shown
_CELL = "padding:.15em .45em;text-align:right;border:0"
# Anchors of the viridis scale, from dark to bright, so that no drawing library is imported.
_VIRIDIS = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")

Matrix = Sequence[Sequence[float]]


def viridis(share: float) -> tuple[str, str]:
    """The colour of a number in [0, 1], and black or white, whichever is readable on it."""
    step = min(len(_VIRIDIS) - 1, int(share * len(_VIRIDIS)))
    return _VIRIDIS[step], "#000000" if step >= len(_VIRIDIS) // 2 else "#ffffff"


def trace_html(title: str, facts: Sequence[tuple[str, str]], matrix: Matrix) -> str:
    """A run: a few facts, and its accuracy matrix."""
    items = " · ".join(f"{escape(name)} <b>{escape(value)}</b>" for name, value in facts)
    return f"<div><b>{escape(title)}</b><br>{items}{_matrix(matrix)}</div>"


def comparison_html(
    title: str,
    heading: Sequence[str],
    rows: Sequence[Sequence[str]],
    matrices: Sequence[tuple[str, Matrix]],
) -> str:
    """Several runs: a table with one row each, and their accuracy matrices."""
    head = "".join(f'<th style="{_CELL}" scope="col">{escape(name)}</th>' for name in heading)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    maps = "".join(
        f'<div style="display:inline-block;margin:.6em 1.2em 0 0;vertical-align:top">'
        f"{escape(name)}{_matrix(matrix)}</div>"
        for name, matrix in matrices
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><b>{escape(title)}</b>{table}{maps}</div>"


def _matrix(matrix: Matrix) -> str:
    """A coloured table of accuracy in percent after a task (rows) on a task (columns)."""
    if len(matrix) > _MOST_TASKS:
        return ""
    known = [value for row in matrix for value in row if math.isfinite(value)]
    low = min(known, default=0.0)
    rows = "".join("<tr>" + "".join(_cell(v, low) for v in row) + "</tr>" for row in matrix)
    caption = "accuracy, %: rows after a task, columns on a task"
    return (
        '<table style="border-collapse:collapse;font-size:85%;margin-top:.4em">'
        f'<caption style="text-align:left;caption-side:bottom">{caption}</caption>{rows}</table>'
    )


def _cell(value: float, low: float) -> str:
    if not math.isfinite(value):
        return f'<td style="{_CELL}"></td>'
    paper, ink = viridis((value - low) / max(100 - low, 1e-9))
    style = f"{_CELL};background:{paper};color:{ink}"
    return f'<td style="{style}">{value:.1f}</td>'
