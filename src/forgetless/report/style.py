"""The style of figures: sizes, lines, maps, files. Without pyplot: no global state."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from forgetless.report import palette
from forgetless.report.comparison import Comparison, compare
from forgetless.support.files import write_atomically
from forgetless.support.validation import ConfigError
from forgetless.trace import Trace

COLUMN = 3.25  # inches: a column of a two-column paper
PAGE = 6.75  # both columns
_SMALL = 7  # points
_TEXT = 8

Runs = Trace | Sequence[Trace] | Comparison


def comparison_of(runs: Runs) -> Comparison:
    """The comparison of runs of one scenario."""
    if isinstance(runs, Comparison):
        return runs
    made = compare(runs)
    if len(made) > 1:
        names = ", ".join(f"{c.title} ({c.measure})" for c in made)
        raise ConfigError(f"runs must be of one scenario for one figure, not of {names}")
    return made[0]


def line(place: int) -> dict[str, Any]:
    """Colour and dashes of the entry at a place in the palette."""
    dashes = palette.dash(place)
    return {"color": palette.colour(place), "linestyle": (0, dashes) if dashes else "-"}


def marker(place: int) -> dict[str, Any]:
    """The marker of the entry at a place in the palette."""
    return {"marker": palette.marker(place)}


def single(width: float, height: float | None = None) -> tuple[Figure, Axes]:
    """A figure with one panel."""
    figure = new_figure(width, width * 0.68 if height is None else height)
    panel = figure.subplots()
    tidy(panel)
    return figure, panel


def grid(
    width: float, count: int, columns: int, ratio: float, **options: Any
) -> tuple[Figure, Any]:
    """A figure with `count` panels of one shape, height over width, and the panels."""
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = new_figure(width, rows * (width / columns * ratio + 0.1) + 0.5)
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    for unused in panels.ravel()[count:]:
        unused.set_visible(False)
    for panel in panels.ravel()[:count]:
        tidy(panel)
    return figure, panels


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03)
    return Figure(figsize=(width, height), layout=layout)


def tidy(panel: Axes) -> None:
    """Thin lines, small type, no frame."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[:].set_linewidth(0.6)
    panel.tick_params(labelsize=_SMALL, width=0.6, length=2.5)
    panel.grid(True, axis="y", color="#e3e5e4", linewidth=0.5)
    panel.set_axisbelow(True)


def label(panel: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    """Label the axes."""
    panel.set_xlabel(x, fontsize=_TEXT)
    panel.set_ylabel(y, fontsize=_TEXT)
    if title:
        panel.set_title(title, fontsize=_TEXT, loc="left")


def whole_numbers(panel: Axes, axis: str = "x") -> None:
    """Few ticks, at whole numbers."""
    chosen = panel.xaxis if axis == "x" else panel.yaxis
    chosen.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def legend(figure: Figure, panel: Axes) -> None:
    """One legend for all panels, above them."""
    handles, names = panel.get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(
            handles,
            [name if len(name) < 30 else f"{name[:29]}…" for name in names],
            loc="outside upper center",
            ncols=min(len(names), 5 if figure.get_figwidth() > COLUMN else 3),
            frameon=False,
            fontsize=_SMALL,
            handlelength=1.4,
            columnspacing=1.0,
        )


def heat_map(
    panel: Axes, matrix: Any, low: float, high: float, scheme: str, shown: Callable[[float], str]
) -> Any:
    """A matrix as coloured cells, with their numbers where there is room."""
    panel.grid(False)
    panel.spines[:].set_visible(False)
    image = panel.imshow(np.ma.masked_invalid(matrix), vmin=low, vmax=high, cmap=scheme)
    tasks = len(matrix)
    if tasks <= 7:
        for (row, column), value in np.ndenumerate(matrix):
            if np.isfinite(value):
                red, green, blue, _ = image.cmap(image.norm(value))
                ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
                panel.text(column, row, shown(value), ha="center", va="center", color=ink, size=6)
    ticks = range(0, tasks, max(1, -(-tasks // 6)))
    names = [str(t + 1) for t in ticks]
    panel.set_xticks(ticks, names)
    panel.set_yticks(ticks, names)
    return image


def colour_bar(figure: Figure, image: Any, panels: Any, words: str) -> None:
    """The scale of the maps' colours."""
    bar = figure.colorbar(image, ax=panels.ravel().tolist(), shrink=0.8, pad=0.02, aspect=25)
    bar.set_label(words, fontsize=_TEXT)
    bar.ax.tick_params(labelsize=_SMALL, width=0.6, length=2.5)
    bar.outline.set_visible(False)


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as PDF, SVG or PNG, by the file's name; text in a PDF stays text."""
    file = Path(path)
    kind = file.suffix.removeprefix(".").lower()
    if kind not in ("pdf", "svg", "png"):
        raise ConfigError(f"path must end in .pdf, .svg or .png, not {file.name!r}")
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):
        write_atomically(file, lambda new: figure.savefig(new, format=kind, dpi=300))
    return file
