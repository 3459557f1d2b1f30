"""The training of one job, in whatever process this is."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from forgetless.launch.engines.jobs import Job
from forgetless.launch.engines.storage import Mirror, ObjectStore
from forgetless.launch.runs import run
from forgetless.support.errors import TrainingError
from forgetless.trace import TRACE_FILE, is_trace, run_status
from forgetless.trace.checkpoint import CHECKPOINTS, Store
from forgetless.training.settings import Observer, Progress


def execute_job(job: Job, observer: Observer | None = None) -> None:
    """Train what is missing of a job, in whatever process this is.

    The folder belongs to the job: without a checkpoint to resume from, its content is replaced.
    """
    if job.order.shared is not None:
        with tempfile.TemporaryDirectory(prefix="forgetless-") as scratch:
            _execute_remotely(job, Path(scratch), ObjectStore(job.order.shared), observer)
        return
    places = (job.folder, job.order.folder)  # files may have been moved to the run's folder already
    if job.resume is not None or not _is_done(
        job, lambda name: any((place / name).is_file() for place in places)
    ):
        _train(job, observer)


def _is_done(job: Job, has: Callable[[str], bool]) -> bool:
    """Whether the job's trace is complete and has the weights that it is to keep.

    Arguments:
        has: whether a file of the run exists.
    """
    config = job.order.config.as_dict()
    return run_status(job.folder, config, job.seeds, job.order.keep, has).kind == "complete"


def _train(
    job: Job, observer: Observer | None, on_checkpoint: Callable[[], None] | None = None
) -> None:
    order = job.order
    run(
        order.config,
        seeds=job.seeds,
        data=order.data,
        out=job.folder,
        overwrite=job.resume is False or not Store(job.folder / CHECKPOINTS).exists(),
        keep=order.keep,
        checkpoint_every=order.checkpoint_every,
        on_checkpoint=on_checkpoint,
        observer=observer,
    )


def _execute_remotely(
    job: Job, scratch: Path, stored: ObjectStore, observer: Observer | None
) -> None:
    """Train in a local folder, and copy checkpoints and the trace to shared storage."""
    here = replace(job, folder=scratch / job.place, order=replace(job.order, folder=scratch))
    storage = stored.within(job.place) if job.place else stored
    mirror, old = Mirror(here.folder, storage, stored), [job.resume is False]
    if job.resume is None:
        names = stored.names()
        if TRACE_FILE in storage.names():
            storage.get(TRACE_FILE, here.folder / TRACE_FILE)
            if _is_done(here, lambda name: name in names):
                return
    if job.resume is not False:
        mirror.fetch()

    def observe(progress: Progress) -> None:
        if old[0]:  # the settings are known to be good by now
            old[0] = False
            stored.remove(TRACE_FILE)
        if observer is not None:
            observer(progress)

    try:
        _train(here, observe, mirror.save)
    except TrainingError:
        if is_trace(here.folder):
            mirror.publish()
        raise
    mirror.publish()
