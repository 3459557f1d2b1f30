"""Results as JSON: compact and rounded, each with its provenance."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forgetless.support.files import write_atomically
from forgetless.support.validation import TraceError

FORMAT = 1
_DIGITS = 6
# A list without lists or objects in it is written on one line.
_FLAT_LIST = re.compile(r"\[[^\[\]{}]*\]")

Data = Mapping[str, Any]
Results = Mapping[str, dict[str, Any]]  # artefact → its record


def rounded(value: Any) -> Any:
    """The same value with floats of six significant digits, arrays as lists, NaN as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value


def save_result(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    """Write an artefact's record."""
    text = json.dumps(rounded(record), indent=1, allow_nan=False, ensure_ascii=False)
    text = _FLAT_LIST.sub(lambda found: " ".join(found.group().split()), text) + "\n"
    write_atomically(folder / f"{name}.json", lambda file: file.write_text(text, "utf-8"))


def load_results(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """The records of those artefacts that have been built."""
    records = {}
    for name in names:
        file = folder / f"{name}.json"
        if not file.is_file():
            continue
        try:
            record = json.loads(file.read_text("utf-8"))
            fits = record["format"] == FORMAT and record["artefact"] == name
            whole = fits and _is_whole(record)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TraceError(
                f"{file} is not a result of `forgetless paper build` ({error}); delete it to build "
                "it again"
            ) from error
        if not fits:
            raise TraceError(f"{file} is of another artefact or another version's format")
        if not whole:
            raise TraceError(f"{file} is damaged; delete it to build it again")
        records[name] = record
    return records


def _is_whole(record: Mapping[str, Any]) -> bool:
    """Whether a record has the fields that every record has."""
    lacks = record.get("lacks", [])
    return (
        all(isinstance(record[part], dict) for part in ("data", "provenance"))
        and all(isinstance(record[part], str) for part in ("scale", "seeds"))
        and isinstance(lacks, list)
        and all(isinstance(cell, str) for cell in lacks)
    )


@contextmanager
def readable(names: str, advice: str = "build it again") -> Iterator[None]:
    """Turn an error while results are shown into one that names the damaged results."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        kind = type(error).__name__
        raise TraceError(f"the result of {names} is damaged ({kind}: {error}); {advice}") from error
