"""What is worked out of a trace is kept beside it, and forgotten when the trace is another one."""

import hashlib
import json
from pathlib import Path
from typing import Any

from forgetless.support.files import write_atomically


def read_beside(folder: Path, name: str, made_as: object) -> Any:
    """What was kept under a name beside the trace in a folder; None if there is nothing of use.

    Arguments:
        folder: with a trace.
        name: of what was kept.
        made_as: a version, or whatever else must be as it was then.
    """
    try:
        record = json.loads(_file(folder, name).read_text("utf-8"))
        fits = record["format"] == made_as and record["of"] == _fingerprint(folder)
        return record["content"] if fits else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # not there, or damaged: it can be made again


def write_beside(folder: Path, name: str, made_as: object, content: object) -> None:
    """Keep what JSON can hold."""
    record = {"format": made_as, "of": _fingerprint(folder), "content": content}
    text = json.dumps(record)
    write_atomically(_file(folder, name), lambda file: file.write_text(text, "utf-8"))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _fingerprint(folder: Path) -> str:
    return hashlib.sha256((folder / "trace.json").read_bytes()).hexdigest()
