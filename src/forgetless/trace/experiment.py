"""Which experiment a run is, and how far the run in a folder is.

`trace.config` is flat: `scenario`, `method` and `model` are names, every other entry is a setting
that the run uses. What a script made itself is marked by `scenario_from`, `method_from` and
`model_from`, the import path or "as given".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isroutine
from pathlib import Path
from typing import Any, Literal, final

from torch import Tensor

from forgetless.support.plugins import AS_GIVEN, import_path
from forgetless.support.provenance import digest_of
from forgetless.trace.checkpoint import CHECKPOINTS, Store
from forgetless.trace.trace import Keep, Trace, is_trace, load_trace, weights_file

# Settings that decide how a run is carried out, not what comes out.
INCIDENTAL = frozenset({"seeds_together", "evaluate", "method_family"})
# The parts of a fingerprint that settings may not explain, and what differs then.
_PARTS = {
    "scenario": "the scenario's options or code",
    "data": "the data",
    "model": "the model's layers or their code",
    "start": "the model's given weights or the function that makes it",
    "method": "the method's options or code",
    "training": "the training's settings",
}

JOBS = "jobs"  # in a run's folder, those of its seeds while they are trained apart


def differences(one: Trace, other: Trace) -> list[str]:
    """What makes two runs different experiments, in words; empty if only their seeds differ.

    Settings are compared one by one, then the fingerprints of model, scenario, data, method and
    training, as far as both traces have them.
    """
    # What a budget chose decides results too.
    here, there = ({**t.config, "stored": t.outcome.get("storage")} for t in (one, other))
    found = [
        f"{name} is {_shown(here.get(name))} and {_shown(there.get(name))}"
        for name in dict.fromkeys([*here, *there])
        if name not in INCIDENTAL and here.get(name) != there.get(name)
    ]
    return found or [f"{words} differ" for words in changed_parts(one, other)]


def same_experiment(one: Trace, other: Trace) -> bool:
    """Whether two runs are the same experiment, so that they can be put together as more seeds."""
    return not differences(one, other)


def changed_parts(one: Trace, other: Trace) -> list[str]:
    """The parts of two runs whose fingerprints differ, in words, as far as both have them."""
    found = []
    for part, words in _PARTS.items():
        here, there = one.fingerprint.get(part), other.fingerprint.get(part)
        if isinstance(here, list) and isinstance(there, list):  # one may have learned fewer tasks
            here, there = (data[: min(len(here), len(there))] for data in (here, there))
        if None not in (here, there) and here != there:
            found.append(words)
    return found


def changed_settings(there: Mapping[str, Any], here: Mapping[str, Any], most: int = 3) -> str:
    """The first settings that differ between a stored run and one to be run, in words.

    A setting that the stored run did not have and that is empty or zero here is no difference.
    """
    names = [
        name
        for name in dict.fromkeys([*there, *here])
        if there.get(name) != here.get(name) and (name in there or here[name])
    ]
    said = [f"{n} is {_shown(there.get(n))} there and {_shown(here.get(n))} here" for n in names]
    more = f" and {len(said) - most} more" if len(said) > most else ""
    return ", ".join(said[:most]) + more


def plain(value: Any) -> Any:
    """A setting as JSON can hold it: finite numbers and texts as they are, objects in words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"tensor {tuple(value.shape)} {digest_of(value)}"
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=str)
    if hasattr(value, "tolist"):  # of NumPy or torch
        return plain(value.tolist())
    path = import_path(value)
    if path != AS_GIVEN or isroutine(value):
        return path
    text = str(value)
    return import_path(type(value)) if " at 0x" in text else text


def _shown(value: Any) -> str:
    return ascii(value)[:60]


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
