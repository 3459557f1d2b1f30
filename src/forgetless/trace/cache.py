"""Results cached next to a trace, invalid once it changes."""

import hashlib
import json
from pathlib import Path
from typing import Any

from forgetless.support.files import write_atomically
from forgetless.trace.trace import TRACE_FILE


def read_beside(folder: Path, name: str, version: object) -> Any:
    """A cached result; None if there is none, or an outdated or damaged one.

    Arguments:
        folder: the trace's.
        name: the result's name.
        version: of the result, or whatever else must be as it was then.
    """
    try:
        record = json.loads(_file(folder, name).read_text("utf-8"))
        fits = record["format"] == version and record["of"] == _fingerprint(folder)
        return record["content"] if fits else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def write_beside(folder: Path, name: str, version: object, content: object) -> None:
    """Cache a result that JSON can hold."""
    record = {"format": version, "of": _fingerprint(folder), "content": content}
    text = json.dumps(record)
    write_atomically(_file(folder, name), lambda file: file.write_text(text, "utf-8"))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _fingerprint(folder: Path) -> str:
    return hashlib.sha256((folder / TRACE_FILE).read_bytes()).hexdigest()
