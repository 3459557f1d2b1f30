"""From artefacts to results: train what is missing, measure, write down."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from forgetless.launch.engines import Engine, Event, InProcess
from forgetless.paper.artefact import Artefact
from forgetless.paper.origin import of_parts, provenance
from forgetless.paper.pictures import Pictures
from forgetless.paper.registry import ARTEFACTS
from forgetless.paper.run import Run
from forgetless.paper.scale import Scale
from forgetless.paper.store import (
    FORMAT,
    is_among,
    load_results,
    overlaid,
    readable,
    rounded,
    save_result,
)
from forgetless.paper.work import Workshop
from forgetless.support.errors import TraceError


@final
@dataclass(frozen=True)
class Stage:
    """Where a build is.

    Arguments:
        what: what is being done, for people.
        done: how much of this build's training is done, and how much there is.
        fresh: whether something new has begun.
        event: what happened to a job, if that is what it is about.
    """

    what: str
    done: float
    total: float
    fresh: bool
    event: Event | None = None


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
        train: whether missing runs are trained. If not, what can be measured without them is, what
            was measured on them before is kept, and artefacts of which nothing can be measured are
            refused.
        engine: where they are trained.
        storage: address of the traces in shared storage; `runs` is then what this machine has.
    """

    scale: Scale
    runs: Path
    results: Path
    data: Path | None = None
    device: str = "auto"
    train: bool = True
    engine: Engine = field(default_factory=InProcess)
    storage: str | None = None


def build(artefacts: Sequence[Artefact], plan: Plan, watch: Watcher) -> None:
    """Build the artefacts; what an earlier build has trained is not again.

    One after another, or with an engine of several workers in rounds: all runs at once of those
    artefacts that need no other that is still to be built.
    """
    begun = time.perf_counter()
    results = load_results(plan.results, list(ARTEFACTS))
    workshop = Workshop(plan.scale, plan.runs, plan.data, plan.device, results, plan.storage)
    waiting = list(artefacts)
    refused: list[TraceError] = []
    while waiting:
        wanted = {artefact.name for artefact in waiting}
        ready = [artefact for artefact in waiting if wanted.isdisjoint(artefact.needs)]
        ready = ready if plan.engine.workers > 1 else waiting[:1]
        effort = _train(ready, waiting, workshop, plan.engine, watch) if plan.train else 0.0
        for artefact in ready:
            try:
                absent = Absent([], []) if plan.train else _absent(artefact, workshop)
            except TraceError as error:
                if len(artefacts) == 1:
                    raise
                refused.append(error)
                watch(Stage(f"{artefact.name}: left out; {error}", effort, effort, fresh=True))
                continue
            watch(Stage(f"{artefact.name}: measuring", effort, effort, fresh=True))
            started = time.perf_counter()
            workshop.begin([*absent.lacks, *absent.kept])
            data = rounded(artefact.measure(workshop))
            earlier: dict[str, Any] = {}
            if absent.kept:
                before = results[artefact.name]
                data = overlaid(before["data"], data)
                earlier = of_parts(before["provenance"], artefact, absent.kept, workshop)
            advice = _advice(artefact, plan.results if absent.kept else None)
            with readable(artefact.name, advice):  # what cannot be shown is not kept
                artefact.show(data, Pictures(""))
            now = time.perf_counter()
            looking = sum(glance.seconds for glance in workshop.glances)
            spent = {"seconds measuring": max(now - started, looking), "seconds wall": now - begun}
            record = {
                "format": FORMAT,
                "artefact": artefact.name,
                "scale": plan.scale.name,
                "seeds": plan.scale.seeds,
                **({"lacks": absent.lacks} if absent.lacks else {}),
                "provenance": provenance(workshop, spent | {"jobs": plan.engine.workers}, earlier),
                "data": data,
            }
            save_result(plan.results, artefact.name, record)
            results |= load_results(plan.results, [artefact.name])
        waiting = [artefact for artefact in waiting if artefact not in ready]
    if len(refused) == len(artefacts):
        raise refused[0]


def _train(
    artefacts: Sequence[Artefact],
    coming: Sequence[Artefact],
    workshop: Workshop,
    engine: Engine,
    watch: Watcher,
) -> float:
    """Train what artefacts need and is not there; returns the effort it was.

    One run at a time is looked at as soon as it is trained, by these and by those that are still
    to come: whoever stops then has lost nothing.
    """
    missing = {run.key: run for artefact in artefacts for run in _missing(artefact, workshop)}
    total = sum(run.effort for run in missing.values())
    names = ", ".join(artefact.name for artefact in artefacts)
    follow = _Follow(watch, names, {key: run.effort for key, run in missing.items()})
    if engine.workers > 1:
        workshop.train(list(missing.values()), engine, follow)
        return total
    looking = [a for a in coming if a.look is not None and set(a.needs) <= set(workshop.results)]
    keys = {a.name: {run.key for run in _runs(a, workshop)} for a in looking}
    for run in missing.values():
        workshop.train([run], engine, follow)
        for artefact in looking:
            if run.key in keys[artefact.name] and artefact.look is not None:
                workshop.looked(artefact.look, run)
    return total


@final
class _Follow:
    """Tells a watcher of what happens to jobs.

    Arguments:
        watch: the watcher.
        names: of what they are for.
        efforts: by the key of each run.
    """

    def __init__(self, watch: Watcher, names: str, efforts: Mapping[str, float]) -> None:
        self._watch = watch
        self._names = names
        self._efforts = efforts
        self._numbers: dict[str, int] = {}  # the runs that have begun, from 1
        self._before = 0.0

    def __call__(self, event: Event) -> None:
        key = event.job.order.folder.name
        if event.kind == "begun":
            self._numbers.setdefault(key, len(self._numbers) + 1)
        what = f"{self._names}: {event.job.order.name}"
        what += f" ({self._numbers.get(key, 0)} of {len(self._efforts)} runs)"
        if event.kind in ("finished", "failed"):
            self._before += event.job.size
        done = self._before
        if event.progress is not None:
            done += event.progress.done * event.job.size
        total = sum(self._efforts.values())
        self._watch(Stage(what, done, total, fresh=event.kind == "begun", event=event))


@final
@dataclass(frozen=True)
class Absent:
    """Parts of an artefact that cannot be measured now, as their runs are not there.

    Arguments:
        lacks: those that never were.
        kept: those that an earlier build has measured on the very same runs.
    """

    lacks: list[str]
    kept: list[str]


def _absent(artefact: Artefact, workshop: Workshop) -> Absent:
    """What is to be left out, or taken from an earlier build.

    Where nothing can be measured, or something would be lost, the artefact is refused.
    """
    for name in artefact.needs:
        if name not in workshop.results:
            raise TraceError(f"{artefact.name} needs {name}, which has not been measured")
    missing, there = _missing(artefact, workshop), artefact.there(workshop)
    if missing and not any(there.values()):
        raise TraceError(
            f"{artefact.name} needs {len(missing)} runs that are not in {workshop.runs}, such as "
            f"{missing[0].key}"
        )
    absent = [part for part, is_there in there.items() if not is_there]
    before = workshop.results.get(artefact.name)
    if before is None or before["scale"] != workshop.scale.name:
        return Absent(absent, [])
    never = [part for part in absent if is_among(part, before.get("lacks", []))]
    known, runs = before["provenance"]["runs"], artefact.parts(workshop.scale, workshop.results)
    kept = [
        part for part in absent if part not in never and all(run.key in known for run in runs[part])
    ]
    lost = [part for part in absent if part not in never and part not in kept]
    if lost:
        raise TraceError(
            f"{artefact.name} has been measured on other runs that are gone ({', '.join(lost)}); "
            f"delete {artefact.name}.json to build it without them"
        )
    return Absent(never, kept)


def _missing(artefact: Artefact, workshop: Workshop) -> list[Run]:
    """The runs of an artefact that are to be trained, with weights if any other looks at them.

    A run that was trained without them would have to be trained again for one that does.
    """
    looked_at = {
        run.key
        for other in ARTEFACTS.values()
        if other.look is not None and set(other.needs) <= set(workshop.results)
        for run in _runs(other, workshop)
    }
    lacking = [run for run in _runs(artefact, workshop) if not artefact.has(workshop, run)]
    return [replace(run, weights=run.key in looked_at) for run in lacking]


def _advice(artefact: Artefact, results: Path | None) -> str:
    """What to delete if what was measured cannot be shown.

    Arguments:
        artefact: whose.
        results: where an earlier result is that was partly kept, None if none was.
    """
    files = [] if results is None else [str(results / f"{artefact.name}.json")]
    files += [] if artefact.look is None else [f"{artefact.name}.json in the folders of its runs"]
    return f"delete {' and '.join(files) or 'the folders of its runs'}"


def _runs(artefact: Artefact, workshop: Workshop) -> Sequence[Run]:
    return artefact.runs(workshop.scale, workshop.results)
