"""The page of a guard: what was protected, what is left free, what was measured, and advice."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgetless.report.document import asset, build_document
from forgetless.report.looks import DISTINCT
from forgetless.support.files import write_atomically
from forgetless.support.validation import format_bytes
from forgetless.trace import nulls

_DASHES = ("", "6 3", "1.5 2.5")


def write_guard_page(content: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page of a guard; see `build_guard_page`."""
    file, text = Path(path), build_guard_page(content)
    write_atomically(file, lambda new: new.write_text(text, "utf-8"))
    return file


def build_guard_page(content: Mapping[str, Any]) -> str:
    """The page of a guard as the text of an HTML file that needs nothing else.

    Arguments:
        content: as `guard.account.account` makes it.
    """
    tasks = content["tasks"]
    entries = [
        {
            "label": f"task {number}",
            "colour": DISTINCT[(number - 1) % len(DISTINCT)],
            "dash": _DASHES[(number - 1) // len(DISTINCT) % len(_DASHES)],
        }
        for number in range(1, max(1, len(tasks)) + 1)
    ]
    group = {**content, "entries": entries, "headline": headline(content)}
    return build_document(
        "Guard report",
        asset("assets/guard.html"),
        nulls({"groups": [group]}),
        [asset("assets/guard.js")],
        asset("assets/guard.css"),
    )


def headline(content: Mapping[str, Any]) -> str:
    """One or two sentences: what is stored, and how well it is kept."""
    tasks = content["tasks"]
    if not tasks:
        return "No task is stored yet, so nothing is protected."
    count = "One task is" if len(tasks) == 1 else f"{len(tasks)} tasks are"
    start = f"{count} stored in {format_bytes(content['memory']['bytes'])}"
    forgotten = [task["number"] for task in tasks if task["is_forgotten"]]
    measured = [task for task in tasks if task["drift"] is not None]
    if forgotten:
        which = (
            f"task {forgotten[0]} is" if len(forgotten) == 1 else f"{len(forgotten)} of them are"
        )
        return f"{start}; {which} being forgotten."
    if not measured:
        return f"{start}; whether they are kept was not measured."
    return f"{start}, and none is being forgotten."
