"""How far the run in a folder is: not begun, unfinished, complete, or another run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from forgetless.trace.checkpoint import CHECKPOINTS, Store
from forgetless.trace.experiment import changed_settings
from forgetless.trace.trace import Keep, Trace, is_trace, load_trace, weights_file

JOBS = "jobs"  # in a run's folder, those of its seeds while they are trained apart


@final
@dataclass(frozen=True)
class RunStatus:
    """What a folder holds of a run.

    Attributes:
        kind: "nothing" of this run or another, "unfinished" if the run can be resumed, "complete",
            or "other" for another run.
        difference: what makes it another run, in words.
    """

    kind: Literal["nothing", "unfinished", "complete", "other"]
    difference: str = ""


def is_complete(
    trace: Trace, keep: Keep | None = None, has: Callable[[str], bool] | None = None
) -> bool:
    """Whether a run has learned all tasks and its weights are stored, if `keep` wants them.

    Arguments:
        keep: what the trace must hold; None if anything will do.
        has: whether there is a file of the run, by its name; by default in the trace's folder.
    """
    if trace.status != "complete":
        return False
    there = has or (lambda name: trace.path is not None and (trace.path / name).is_file())
    files = (weights_file(s, t) for s in trace.seeds for t in range(len(trace.tasks)))
    return keep in (None, "nothing") or all(map(there, files))


def run_status(
    folder: Path,
    config: Mapping[str, Any],
    seeds: Sequence[int],
    keep: Keep | None = None,
    has: Callable[[str], bool] | None = None,
) -> RunStatus:
    """What a folder holds of the run with this configuration and these seeds.

    Arguments:
        folder: its folder.
        config: as `Trace.config`.
        keep, has: as in `is_complete`; a run to be resumed must have begun with the same `keep`.
    """
    wanted = {**config, "seeds": list(seeds)}
    if is_trace(folder):
        trace = load_trace(folder)
        if trace.status == "complete":
            difference = changed_settings({**trace.config, "seeds": list(trace.seeds)}, wanted)
            if not difference and not is_complete(trace, keep, has):
                difference = "its weights were not stored"
            return RunStatus("other" if difference else "complete", difference)
    store = Store(folder / CHECKPOINTS)
    if store.exists():
        begun = store.manifest()
        if begun is None:
            return RunStatus("unfinished")  # what cannot be read is left to `fit`, which says why
        settings = begun["settings"]
        difference = changed_settings(settings, wanted | {"keep": keep or settings.get("keep")})
        return RunStatus("other" if difference else "unfinished", difference)
    if is_trace(folder):
        return RunStatus("other", "it has no checkpoint to resume from")
    return _status_of_parts(folder, config, seeds, keep)


def _status_of_parts(
    folder: Path, config: Mapping[str, Any], seeds: Sequence[int], keep: Keep | None
) -> RunStatus:
    """What there is of a run whose seeds were being trained apart."""
    parts = [*folder.glob(f"{JOBS}/*")]
    found = [_status_of_part(part, config, seeds, keep) for part in parts]
    others = [status for status in found if status.kind == "other"]
    if others:
        return others[0]
    begun = any(status.kind != "nothing" for status in found)
    return RunStatus("unfinished" if begun else "nothing")


def _status_of_part(
    folder: Path, config: Mapping[str, Any], seeds: Sequence[int], keep: Keep | None
) -> RunStatus:
    """What a folder holds of some of a run's seeds."""
    store = Store(folder / CHECKPOINTS)
    manifest = store.manifest()
    if manifest is not None:
        own = manifest["settings"]["seeds"]
    elif is_trace(folder):
        own = list(load_trace(folder).seeds)
    else:
        own = list(seeds)
    if not set(own) <= set(seeds):
        return RunStatus("other", f"seeds {own} are there and {list(seeds)} here")
    status = run_status(folder, config, own, keep)
    if status.kind == "other" and is_trace(folder) and not store.exists():
        # A part that was killed before its first checkpoint begins again.
        trace = load_trace(folder)
        if not changed_settings(trace.config, config):
            return RunStatus("unfinished")
    return status
