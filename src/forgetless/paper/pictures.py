"""Figures of the page: the same numbers always give the same file."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from forgetless.paper.benchmarks import NAMES

_STYLE: Any = {
    "svg.hashsalt": "forgetless",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
}


@final
class Pictures:
    """The figures of a page as SVG, by name.

    Arguments:
        folder: the folder of the figures in the page's links.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: dict[str, bytes] = {}

    def add(self, name: str, alt: str, draw: Callable[[], Figure]) -> str:
        """Draw a figure; returns the line of Markdown that shows it."""
        with mpl.rc_context(_STYLE):
            figure = draw()
            file = io.BytesIO()
            # Without a date the same figure is the same file; the white ground serves dark pages.
            figure.savefig(file, format="svg", metadata={"Date": None}, facecolor="white")
        self.files[f"{name}.svg"] = file.getvalue()
        return f"![{alt}]({self.folder}/{name}.svg)"

    def save(self, folder: Path) -> None:
        """Write them all, and remove those of an earlier page."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.svg"):
            if old.name not in self.files:
                old.unlink()
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def panels(
    titles: list[str], *, width: float = 3.0, height: float = 2.6
) -> tuple[Figure, list[Axes]]:
    """A row of panels with titles."""
    figure = Figure(figsize=(width * len(titles) + 0.4, height), layout="constrained")
    axes = figure.subplots(1, len(titles), squeeze=False)[0]
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(NAMES.get(title, title), fontsize=10)
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return figure, list(axes)


def legend_below(figure: Figure, panel: Axes, columns: int) -> None:
    """One legend for all panels, from the labels in one of them."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
