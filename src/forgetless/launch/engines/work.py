"""A job carried out, by whatever process: begun, gone on with, or found to be done already."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from forgetless.launch.engines.job import Job
from forgetless.launch.engines.mirror import Mirror
from forgetless.launch.engines.storage import ObjectStore
from forgetless.launch.runs import run, standing
from forgetless.support.errors import TrainingError
from forgetless.trace import is_trace, load_trace
from forgetless.trace.checkpoint import CHECKPOINTS, Store
from forgetless.training.settings import Observer, Progress


def carry_out(job: Job, observer: Observer | None = None) -> None:
    """Train what is missing of a job.

    Its folder belongs to the job: what an attempt before has left there without a checkpoint to
    go on from is replaced.
    """
    if job.order.storage is not None:
        with tempfile.TemporaryDirectory(prefix="forgetless-") as scratch:
            _carry_out_elsewhere(job, Path(scratch), ObjectStore(job.order.storage), observer)
        return
    places = (job.folder, job.order.folder)
    if job.fresh or not is_done(job, lambda name: any((p / name).is_file() for p in places)):
        _train(job, observer)


def is_done(job: Job, has: Callable[[str], bool]) -> bool:
    """Whether the job's trace is complete and has the weights that are to be kept.

    Arguments:
        has: whether a file of the run is there; it may have been moved from the job's folder to
            the run's.
    """
    if standing(job.folder, job.order.config) != "complete":
        return False
    trace = load_trace(job.folder)
    last = f"task-{len(trace.tasks):02d}.safetensors"
    kept = job.order.keep == "nothing" or all(has(f"seed-{s}/{last}") for s in job.seeds)
    return trace.seeds == job.seeds and kept


def _train(
    job: Job, observer: Observer | None, on_checkpoint: Callable[[], None] | None = None
) -> None:
    order = job.order
    begun = Store(job.folder / CHECKPOINTS).exists() and not job.fresh
    run(
        order.config,
        seeds=job.seeds,
        data=order.data,
        out=job.folder,
        overwrite=not begun,
        keep=order.keep,
        checkpoint_every=order.checkpoint_every,
        on_checkpoint=on_checkpoint,
        observer=observer,
    )


def _carry_out_elsewhere(
    job: Job, scratch: Path, run: ObjectStore, observer: Observer | None
) -> None:
    """Train in a folder of this machine, and copy checkpoints and the trace to the storage."""
    here = replace(job, folder=scratch / job.place, order=replace(job.order, folder=scratch))
    storage = run.within(job.place) if job.place else run
    mirror, old = Mirror(here.folder, storage, run), [job.fresh]
    if not job.fresh:
        names = run.names()
        if "trace.json" in storage.names():
            storage.get("trace.json", here.folder / "trace.json")
            if is_done(here, lambda name: name in names):
                return
        mirror.fetch()

    def observe(progress: Progress) -> None:
        if old[0]:  # the settings are known to be good by now
            old[0] = False
            run.remove("trace.json")
        if observer is not None:
            observer(progress)

    try:
        _train(here, observe, mirror.save)
    except TrainingError:
        if is_trace(here.folder):
            mirror.publish()
        raise
    mirror.publish()
