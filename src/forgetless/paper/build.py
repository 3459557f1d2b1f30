"""From artefacts to results: train missing runs, measure, write."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from forgetless.data.datasets import file_hashes
from forgetless.launch.engines import Engine, Event, InProcess
from forgetless.paper.artefacts import ARTEFACTS
from forgetless.paper.benchmarks import Run, Scale
from forgetless.paper.pictures import Pictures
from forgetless.paper.results import FORMAT, load_results, readable, rounded, save_result
from forgetless.paper.workshop import Artefact, Workshop
from forgetless.support.provenance import versions
from forgetless.support.validation import TraceError


@final
@dataclass(frozen=True)
class Stage:
    """The progress of a build.

    Arguments:
        what: the present step, in words.
        done: the training that is done, in the unit of `Run.effort`.
        total: the training in all.
        fresh: whether a new step has begun.
        event: of a job, if that is the news.
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
    """How and where to build.

    Arguments:
        scale: the size of everything.
        runs: folder of the traces, which later builds use again.
        results: folder of the results.
        data: folder with datasets, or None.
        device: in the format of the command line.
        train: whether to train missing runs. If not, their cells are left out, and artefacts
            without any run are refused.
        engine: trains them.
        shared: address of the traces in shared storage; `runs` is then this machine's copy.
    """

    scale: Scale
    runs: Path
    results: Path
    data: Path | None = None
    device: str = "auto"
    train: bool = True
    engine: Engine = field(default_factory=InProcess)
    shared: str | None = None


def build(artefacts: Sequence[Artefact], plan: Plan, watch: Watcher) -> None:
    """Build the artefacts; runs that an earlier build trained are used again.

    One after another; an engine with several workers trains at once the runs of all artefacts
    that need no other artefact that is still to be built.
    """
    begun = time.perf_counter()
    results = load_results(plan.results, list(ARTEFACTS))
    workshop = Workshop(plan.scale, plan.runs, plan.data, plan.device, results, plan.shared)
    waiting = list(artefacts)
    refused: list[TraceError] = []
    while waiting:
        wanted = {artefact.name for artefact in waiting}
        ready = [artefact for artefact in waiting if wanted.isdisjoint(artefact.needs)]
        ready = ready if plan.engine.workers > 1 else waiting[:1]
        effort = _train(ready, waiting, workshop, plan.engine, watch) if plan.train else 0.0
        for artefact in ready:
            try:
                _check_needs(artefact, workshop)
                lacks = [] if plan.train else _lacking(artefact, workshop)
            except TraceError as error:
                if len(artefacts) == 1:
                    raise
                refused.append(error)
                watch(Stage(f"{artefact.name}: left out; {error}", effort, effort, fresh=True))
                continue
            watch(Stage(f"{artefact.name}: measuring", effort, effort, fresh=True))
            record = _measure(artefact, workshop, lacks)
            record["provenance"] |= {
                "seconds wall": time.perf_counter() - begun,
                "jobs": plan.engine.workers,
            }
            save_result(plan.results, artefact.name, record)
            results |= load_results(plan.results, [artefact.name])
        waiting = [artefact for artefact in waiting if artefact not in ready]
    if len(refused) == len(artefacts):
        raise refused[0]


def _measure(artefact: Artefact, workshop: Workshop, lacks: Sequence[str]) -> dict[str, Any]:
    """The record of an artefact, without the cells that it lacks."""
    started = time.perf_counter()
    workshop.begin()
    every = artefact.cells(workshop.scale, workshop.results)
    cells = {cell: run for cell, run in every.items() if cell not in lacks}
    data = rounded(artefact.measure(workshop, cells))
    file = "" if artefact.probe is None else f"{artefact.name}.json in "
    with readable(artefact.name, f"delete {file}the folders of its runs"):
        artefact.show(data, Pictures(""))  # data that cannot be shown is not written
    spent = time.perf_counter() - started
    probing = sum(result.seconds for result in workshop.probed)
    return {
        "format": FORMAT,
        "artefact": artefact.name,
        "scale": workshop.scale.name,
        "seeds": workshop.scale.seeds,
        **({"lacks": list(lacks)} if lacks else {}),
        "provenance": _provenance(workshop, max(spent, probing)),
        "data": data,
    }


def _provenance(workshop: Workshop, seconds: float) -> dict[str, Any]:
    """The code, data, device, and every run with its settings, behind the numbers."""
    scenarios = {trace.scenario for trace in workshop.used.values()}
    sources = sorted({name.split("-", 1)[1] for name in scenarios})
    runs: dict[str, dict[str, Any]] = {
        key: {
            "seconds": trace.timings["total"],
            "code": trace.versions["code"],
            "device": trace.versions["device"],
            "torch": trace.versions["torch"],
            "seeds": list(trace.seeds),
            "config": trace.config,
        }
        for key, trace in sorted(workshop.used.items())
    }
    return versions(workshop.device) | {
        "data": {name: file_hashes(name, workshop.data) for name in sources},
        "seconds measuring": seconds,
        "probed on": sorted({result.versions["device"] for result in workshop.probed}),
        "seconds training": sum(run["seconds"] for run in runs.values()),
        "runs": runs,
    }


def _train(
    artefacts: Sequence[Artefact],
    coming: Sequence[Artefact],
    workshop: Workshop,
    engine: Engine,
    watch: Watcher,
) -> float:
    """Train the missing runs of artefacts; returns their effort.

    A single worker probes each run as soon as it is trained, for these artefacts and for those
    still to come: an interruption then loses nothing.
    """
    missing = {run.key: run for artefact in artefacts for run in _missing(artefact, workshop)}
    total = sum(run.effort for run in missing.values())
    names = ", ".join(artefact.name for artefact in artefacts)
    follow = _follow(watch, names, len(missing), total)
    if engine.workers > 1:
        workshop.train(list(missing.values()), engine, follow)
        return total
    probes = [
        (artefact.probe, {run.key for run in artefact.runs(workshop.scale, workshop.results)})
        for artefact in coming
        if artefact.probe is not None and set(artefact.needs) <= set(workshop.results)
    ]
    for run in missing.values():
        workshop.train([run], engine, follow)
        for probe, keys in probes:
            if run.key in keys:
                workshop.probe(probe, run)
    return total


def _follow(watch: Watcher, names: str, runs: int, total: float) -> Callable[[Event], None]:
    """Passes the events of jobs on to a watcher.

    Arguments:
        watch: the watcher.
        names: of the artefacts that the jobs are for.
        runs: the number of runs that are trained.
        total: their effort.
    """
    numbers: dict[str, int] = {}  # of the runs that have begun, from 1
    before = 0.0

    def follow(event: Event) -> None:
        nonlocal before
        key = event.job.order.folder.name
        if event.kind == "begun":
            numbers.setdefault(key, len(numbers) + 1)
        if event.kind in ("finished", "failed"):
            before += event.job.size
        running = 0.0 if event.progress is None else event.progress.done * event.job.size
        what = f"{names}: {event.job.order.name} ({numbers.get(key, 0)} of {runs} runs)"
        watch(Stage(what, before + running, total, fresh=event.kind == "begun", event=event))

    return follow


def _check_needs(artefact: Artefact, workshop: Workshop) -> None:
    """Reject an artefact that needs another one that is not measured, or not completely."""
    for name in artefact.needs:
        if name not in workshop.results or workshop.results[name].get("lacks"):
            raise TraceError(f"{artefact.name} needs {name}, which has not been measured")


def _lacking(artefact: Artefact, workshop: Workshop) -> list[str]:
    """The cells whose runs are not there.

    An artefact is refused if all runs are missing, or if an earlier result would lose a cell.
    """
    cells = artefact.cells(workshop.scale, workshop.results)
    missing = {
        cell: run
        for cell, run in cells.items()
        if run is not None and not artefact.has(workshop, run)
    }
    if missing and len(missing) == len(cells):
        example = next(iter(missing.values())).key
        raise TraceError(
            f"{artefact.name} needs {len(missing)} runs that are not in {workshop.runs}, such as "
            f"{example}"
        )
    before = workshop.results.get(artefact.name)
    if before is not None and before["scale"] == workshop.scale.name:
        lost = [cell for cell in missing if cell not in before.get("lacks", [])]
        if lost:
            raise TraceError(
                f"{artefact.name} was measured on runs that are gone ({', '.join(lost)}); delete "
                f"{artefact.name}.json to build it without them"
            )
    return list(missing)


def _missing(artefact: Artefact, workshop: Workshop) -> list[Run]:
    """The runs of an artefact that are to be trained, with weights if any artefact probes them.

    A run that was trained without them would have to be trained again for one that does.
    """
    scale, results = workshop.scale, workshop.results
    probed = {
        run.key
        for other in ARTEFACTS.values()
        if other.probe is not None and set(other.needs) <= set(results)
        for run in other.runs(scale, results)
    }
    runs = artefact.runs(scale, results)
    return [
        replace(run, weights=run.key in probed) for run in runs if not artefact.has(workshop, run)
    ]
