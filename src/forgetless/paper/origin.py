"""Where an artefact's numbers come from."""

from collections.abc import Mapping, Sequence
from typing import Any

from forgetless.data.sources import file_hashes
from forgetless.paper.artefact import Artefact
from forgetless.paper.work import Workshop
from forgetless.support.provenance import versions


def of_parts(
    before: Mapping[str, Any], artefact: Artefact, names: Sequence[str], workshop: Workshop
) -> dict[str, Any]:
    """An earlier build's provenance with the runs of some parts alone."""
    parts = artefact.parts(workshop.scale, workshop.results)
    keys = {run.key for name in names for run in parts[name]}
    runs = {key: of for key, of in before["runs"].items() if key in keys}
    return {**before, "runs": runs}


def provenance(
    workshop: Workshop, spent: Mapping[str, float], earlier: Mapping[str, Any]
) -> dict[str, Any]:
    """Where the numbers come from: code, data, device, and every run with its settings.

    Arguments:
        workshop: where they were measured.
        spent: seconds of measuring and since the build began, and how many jobs at a time.
        earlier: that of the parts that were kept.
    """
    scenarios = {trace.scenario for trace in workshop.used.values()}
    sources = sorted({name.split("-", 1)[1] for name in scenarios})
    runs = earlier.get("runs", {}) | {
        key: {
            "seconds": trace.timings["total"],
            "code": trace.versions["code"],
            "device": trace.versions["device"],
            "torch": trace.versions["torch"],
            "config": {k: v for k, v in trace.config.items() if k != "device"},
        }
        for key, trace in workshop.used.items()
    }
    devices = {glance.versions["device"] for glance in workshop.glances}
    return versions(workshop.device) | {
        "data": earlier.get("data", {})
        | {name: file_hashes(name, workshop.data) for name in sources},
        **spent,
        "seconds measuring": spent["seconds measuring"] + earlier.get("seconds measuring", 0.0),
        "looked at on": sorted(devices | set(earlier.get("looked at on", []))),
        "seconds training": sum(run["seconds"] for run in runs.values()),
        "runs": dict(sorted(runs.items())),
    }
