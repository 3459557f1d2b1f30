"""What a run leaves on disk: its trace, metrics on it, checkpoints and cached results."""

from forgetless.trace.trace import (
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
    "Metric",
    "Trace",
    "is_trace",
    "load_trace",
    "make_room",
    "merged_seeds",
    "nulls",
    "remove_unfinished",
]
