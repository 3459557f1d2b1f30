"""A job carried out, by whatever process: begun, gone on with, or found to be done already."""

from forgetless.checkpoint import CHECKPOINTS, Store
from forgetless.engines.job import Job
from forgetless.runs import run, standing
from forgetless.trace import load_trace
from forgetless.training import Observer


def carry_out(job: Job, observer: Observer | None = None) -> None:
    """Train what is missing of a job.

    Its folder belongs to the job: what an attempt before has left there without a checkpoint to
    go on from is replaced.
    """
    if not job.fresh and is_done(job):
        return
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
        observer=observer,
    )


def is_done(job: Job) -> bool:
    """Whether the job's trace is complete and has the weights that are to be kept."""
    if standing(job.folder, job.order.config) != "complete":
        return False
    trace = load_trace(job.folder)
    last = f"task-{len(trace.tasks):02d}.safetensors"
    # They may have been moved to the run's folder already, before that was stopped.
    places = (job.folder, job.order.folder)
    kept = (any((p / f"seed-{s}" / last).is_file() for p in places) for s in job.seeds)
    return trace.seeds == job.seeds and (job.order.keep == "nothing" or all(kept))
