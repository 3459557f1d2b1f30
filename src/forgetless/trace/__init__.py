"""What a run leaves on disk: its trace, metrics on it, checkpoints and cached results."""

from forgetless.trace.experiment import (
    INCIDENTAL,
    JOBS,
    RunStatus,
    differences,
    is_complete,
    run_status,
    same_experiment,
)
from forgetless.trace.trace import (
    BEST_WITHIN,
    KEEPS,
    TRACE_FILE,
    Keep,
    Metric,
    Trace,
    is_trace,
    load_trace,
    make_room,
    merged_seeds,
    nulls,
    remove_unfinished,
)

__all__ = [
    "BEST_WITHIN",
    "INCIDENTAL",
    "JOBS",
    "KEEPS",
    "TRACE_FILE",
    "Keep",
    "Metric",
    "RunStatus",
    "Trace",
    "differences",
    "is_complete",
    "is_trace",
    "load_trace",
    "make_room",
    "merged_seeds",
    "nulls",
    "remove_unfinished",
    "run_status",
    "same_experiment",
]
