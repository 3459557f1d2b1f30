"""An analysis is kept beside its trace."""

from collections.abc import Callable
from pathlib import Path

from forgetless.report.analysis.analysis import Analysis
from forgetless.report.analysis.measure import SAMPLES, analyse
from forgetless.trace import Trace
from forgetless.trace.cache import read_beside, write_beside

FORMAT = 2
_NAME = "analysis"


def known_analysis(trace: Trace) -> Analysis | None:
    """The analysis that lies beside a trace, if it is of this very run."""
    plain = None if trace.path is None else read_beside(trace.path, _NAME, FORMAT)
    try:
        return None if plain is None else Analysis.restore(plain)
    except (ValueError, TypeError, KeyError, AttributeError):
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
        write_beside(trace.path, _NAME, FORMAT, made.plain())
    return made
