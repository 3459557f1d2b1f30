"""From artefacts to results: train what is missing, measure, write down."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

from forgetless.data.sources import file_hashes
from forgetless.errors import TraceError
from forgetless.paper.artefact import Artefact
from forgetless.paper.registry import ARTEFACTS
from forgetless.paper.scale import Scale
from forgetless.paper.store import FORMAT, load_results, save_result
from forgetless.paper.work import Run, Workshop
from forgetless.provenance import versions
from forgetless.training import Progress


@final
@dataclass(frozen=True)
class Stage:
    """Where a build is.

    Arguments:
        what: what is being done, for people.
        done: training steps of this build that are done, and their number.
        fresh: whether something new has begun.
    """

    what: str
    done: float
    total: float
    fresh: bool


Watcher = Callable[[Stage], None]


@final
@dataclass(frozen=True)
class Plan:
    """Where things are.

    Arguments:
        scale: how large everything is.
        runs: folder of the traces, which are kept and used again.
        results: folder of the results.
        data: folder with datasets, or None.
        device: as the command line takes it.
        train: whether missing runs are trained. If not, artefacts that can be measured without
            them are, and others are refused.
    """

    scale: Scale
    runs: Path
    results: Path
    data: Path | None = None
    device: str = "auto"
    train: bool = True


def build(artefacts: Sequence[Artefact], plan: Plan, watch: Watcher) -> None:
    """Build the artefacts one after another; what an earlier build has trained is not again."""
    results = load_results(plan.results, list(ARTEFACTS))
    workshop = Workshop(plan.scale, plan.runs, plan.data, plan.device, results)
    for artefact in artefacts:
        steps = _train(artefact, workshop, watch) if plan.train else _check(artefact, workshop)
        watch(Stage(f"{artefact.name}: measuring", steps, steps, fresh=True))
        started = time.perf_counter()
        workshop.used.clear()
        data = artefact.measure(workshop)
        record = {
            "format": FORMAT,
            "artefact": artefact.name,
            "scale": plan.scale.name,
            "seeds": plan.scale.seeds,
            "provenance": _provenance(workshop, time.perf_counter() - started),
            "data": data,
        }
        save_result(plan.results, artefact.name, record)
        results |= load_results(plan.results, [artefact.name])


def _train(artefact: Artefact, workshop: Workshop, watch: Watcher) -> float:
    """Train what an artefact needs and is not there; returns the steps that took."""
    wanted = {run.key: run for run in _with_weights(artefact, workshop)}
    missing = [run for run in wanted.values() if not workshop.is_trained(run)]
    total, done = float(sum(run.steps for run in missing)), 0.0
    for number, run in enumerate(missing, 1):
        what = f"{artefact.name}: {run.config.scenario} {run.config.method}"
        what += f" ({number} of {len(missing)} runs)"
        watch(Stage(what, done, total, fresh=True))
        workshop.train(run, partial(_observe, watch, Stage(what, done, total, fresh=False), run))
        done += run.steps
    return total


def _check(artefact: Artefact, workshop: Workshop) -> float:
    """Refuse an artefact that needs runs which are not there; no steps are needed for the rest."""
    missing = [run for run in _with_weights(artefact, workshop) if not workshop.is_trained(run)]
    if missing and not artefact.may_lack:
        raise TraceError(
            f"{artefact.name} needs {len(missing)} runs that are not in {workshop.runs}, such as "
            f"{missing[0].key}"
        )
    return 0.0


def _observe(watch: Watcher, before: Stage, run: Run, progress: Progress) -> None:
    """Tell the watcher how far a run is that began at a stage."""
    watch(replace(before, done=before.done + progress.done * run.steps))


def _with_weights(artefact: Artefact, workshop: Workshop) -> list[Run]:
    """The artefact's runs, with weights if any artefact at all looks at them.

    A run that was trained without them would have to be trained again for one that does.
    """
    looked_at = {
        run.key
        for other in ARTEFACTS.values()
        if set(other.needs) <= set(workshop.results)
        for run in other.runs(workshop.scale, workshop.results)
        if run.weights
    }
    own = artefact.runs(workshop.scale, workshop.results)
    return [replace(run, weights=run.key in looked_at) for run in own]


def _provenance(workshop: Workshop, seconds: float) -> dict[str, Any]:
    """Where the numbers come from: code, data, device, and every run with its settings."""
    scenarios = {trace.scenario for trace in workshop.used.values()}
    sources = sorted({name.split("-", 1)[1] for name in scenarios})
    return versions(workshop.device) | {
        "data": {name: file_hashes(name, workshop.data) for name in sources},
        "seconds measuring": seconds,
        "seconds training": sum(t.timings["total"] for t in workshop.used.values()),
        "runs": {
            key: {
                "seconds": trace.timings["total"],
                "code": trace.versions["code"],
                "device": trace.versions["device"],
                "torch": trace.versions["torch"],
                "config": {k: v for k, v in trace.config.items() if k != "device"},
            }
            for key, trace in sorted(workshop.used.items())
        },
    }
