"""An analysis is kept beside its trace, and forgotten when the trace is another one."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from forgetless.analysis.analysis import Analysis
from forgetless.analysis.measure import SAMPLES, analyse
from forgetless.atomic import write_atomically
from forgetless.trace import Trace

FORMAT = 1
_FILE = "analysis.json"


def known_analysis(trace: Trace) -> Analysis | None:
    """The analysis that lies beside a trace, if it is of this very run."""
    if trace.path is None or not (trace.path / _FILE).is_file():
        return None
    try:
        record = json.loads((trace.path / _FILE).read_text("utf-8"))
        if record["format"] != FORMAT or record["of"] != _fingerprint(trace.path):
            return None
        return Analysis.restore(record["analysis"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # damaged: it can be made again


def analysed(
    trace: Trace,
    *,
    data: Path | None = None,
    samples: int = SAMPLES,
    observer: Callable[[str], None] | None = None,
) -> Analysis:
    """The analysis of a trace: the one beside it, or a new one that is then put there."""
    known = known_analysis(trace)
    if known is not None and known.samples == samples:
        return known
    made = analyse(trace, data=data, samples=samples, observer=observer)
    if trace.path is not None:
        record = {"format": FORMAT, "of": _fingerprint(trace.path), "analysis": made.plain()}
        text = json.dumps(record)
        write_atomically(trace.path / _FILE, lambda file: file.write_text(text, "utf-8"))
    return made


def _fingerprint(folder: Path) -> str:
    return hashlib.sha256((folder / "trace.json").read_bytes()).hexdigest()
