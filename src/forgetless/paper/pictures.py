"""Figures of the page: the same numbers always give the same file."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Colours that colour-blind readers can tell apart (Okabe and Ito), one for each method.
COLOURS = {
    "sgd": "#000000",
    "ewc": "#E69F00",
    "a-gem": "#009E73",
    "gem": "#56B4E9",
    "gem-nt": "#CC79A7",
    "joint": "#999999",
    "ogd": "#D55E00",
    "pca-ogd": "#0072B2",
}
LABELS = {
    "sgd": "SGD",
    "ewc": "EWC",
    "a-gem": "A-GEM",
    "gem": "GEM",
    "gem-nt": "GEM-NT",
    "joint": "joint",
    "ogd": "OGD",
    "pca-ogd": "PCA-OGD",
}
NAMES = {
    "permuted": "Permuted",
    "rotated": "Rotated",
    "split": "Split MNIST",
    "cifar": "Split CIFAR",
}


def titled(part: str) -> str:
    """The name of an artefact's part for people: "cifar/frozen/ewc" is "Split CIFAR (frozen, EWC)".

    What follows the benchmark is set off by a blank or by slashes.
    """
    benchmark, *rest = re.split("[ /]", part, maxsplit=1)
    words = ", ".join(LABELS.get(word, word) for word in "".join(rest).split("/") if word)
    return NAMES.get(benchmark, benchmark) + (f" ({words})" if words else "")


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
        folder: where they will lie, as the page's links say it.
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
        """Write them all, and remove what an earlier page left."""
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
