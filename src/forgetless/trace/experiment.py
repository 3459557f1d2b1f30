"""Which experiment a run is: its settings, and fingerprints of what settings do not say.

`trace.config` is flat: `scenario`, `method` and `model` are names, every other entry is a setting
that the run uses. What a script made itself is marked by `scenario_from`, `method_from` and
`model_from`, the import path or "as given".
"""

import hashlib
import json
import math
from collections.abc import Mapping
from inspect import isroutine
from typing import Any

import torch
from torch import Tensor

from forgetless.support.imports import AS_GIVEN, import_path
from forgetless.trace.trace import Trace

# Settings that decide how a run is carried out, not what comes out.
INCIDENTAL = frozenset({"seeds_together", "evaluate"})
# The parts of a fingerprint that settings may not explain, and what differs then.
_PARTS = {
    "scenario": "the scenario's options or code",
    "data": "the data",
    "model": "the model's layers or their code",
    "start": "the model's given weights or the function that makes it",
    "method": "the method's options or code",
    "training": "the training's settings",
}


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


def digest_of(*parts: Any) -> str:
    """A checksum of tensors, with their shapes and types, and of plain values."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{tuple(part.shape)} {part.dtype};".encode())
            flat = part.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data)
        else:
            digest.update(json.dumps(part, sort_keys=True, default=str).encode() + b";")
    return digest.hexdigest()


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
