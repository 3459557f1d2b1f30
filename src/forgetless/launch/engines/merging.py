"""The traces of a run's jobs as one."""

import shutil
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from forgetless.launch.engines.jobs import Job, Order, Outcome
from forgetless.launch.engines.storage import download, publish
from forgetless.support.errors import ForgetlessError, TrainingError
from forgetless.trace import JOBS, is_trace, load_trace, merged_seeds


def merge(order: Order, outcomes: Sequence[Outcome]) -> ForgetlessError | None:
    """Merge the traces of a run's jobs into the trace that one job would have written.

    Arguments:
        outcomes: of its jobs, in the order of their seeds.

    Returns:
        the error that stopped the run. Seeds after one that diverged are left out, as in a run
        that trains them one after another.
    """
    failed = next((outcome for outcome in outcomes if outcome.error), None)
    if failed and not isinstance(failed.error, TrainingError):
        return failed.error  # nothing is lost: the jobs resume where they are
    if order.shared is not None:
        download(order.shared, order.folder)
    until = outcomes.index(failed) + 1 if failed else len(outcomes)
    jobs = [outcome.job for outcome in outcomes[:until] if is_trace(outcome.job.folder)]
    if jobs and not jobs[0].is_whole:
        _merge_traces(order, jobs)
    shutil.rmtree(order.folder / JOBS, ignore_errors=True)
    if order.shared is not None:
        publish(order.shared, order.folder, order.config.seed_list())
    return failed.error if failed else None


def _merge_traces(order: Order, jobs: Sequence[Job]) -> None:
    parts = [load_trace(job.folder) for job in jobs]
    furthest = max(parts, key=lambda part: int(np.isfinite(part.accuracy).sum()))
    found, seeds = merged_seeds(parts), order.config.seed_list()
    accuracy = np.full((len(seeds), *found.accuracy.shape[1:]), np.nan)
    accuracy[[seeds.index(seed) for seed in found.seeds]] = found.accuracy
    for job in jobs:
        for seed in job.seeds:
            kept = job.folder / f"seed-{seed}"
            if kept.is_dir():
                kept.replace(order.folder / kept.name)
    # The record comes last: whoever finds it finds all of the run.
    merged = replace(found, seeds=seeds, accuracy=accuracy, tasks=furthest.tasks, path=order.folder)
    merged.save_record()
