"""The page: all results and verdicts as Markdown, made from the stored records alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgetless.paper.pictures import Pictures
from forgetless.paper.registry import ARTEFACTS
from forgetless.paper.store import load_results
from forgetless.trace import write_atomically


def write_page(results: Path, page: Path, images: Path) -> None:
    """Build the page and its figures from the results.

    Arguments:
        results: folder of the records.
        page: the file to write.
        images: folder for the figures, at or below the page's.
    """
    records = load_results(results, list(ARTEFACTS))
    text, pictures = make_page(records, images.relative_to(page.parent).as_posix())
    write_atomically(page, lambda file: file.write_text(text, "utf-8"))
    pictures.save(images)


def make_page(records: Mapping[str, dict[str, Any]], images: str) -> tuple[str, Pictures]:
    """The page's text and its figures, which lie in `images` as seen from the page."""
    pictures = Pictures(images)
    lines = ["# The paper, reproduced and judged", ""]
    for name, artefact in ARTEFACTS.items():
        lines += [f"## {artefact.title}", "", f"*{artefact.place}*", ""]
        if name in records:
            lines += artefact.show(records[name]["data"], pictures)
        else:
            lines += ["Not measured yet.", ""]
    return "\n".join(lines), pictures
