"""Runs on an engine: divided into jobs, carried out, put together again."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from forgetless.launch.engines.division import clear, divided, put_together
from forgetless.launch.engines.job import Engine, Event, Job, Order, Outcome, Watch
from forgetless.launch.engines.shared import collect, settle
from forgetless.support.errors import ConfigError, ForgetlessError, TrainingError
from forgetless.support.sizes import AUTO
from forgetless.trace.checkpoint import FolderLock


def train(
    orders: Sequence[Order], engine: Engine, watch: Watch
) -> Generator[tuple[Order, ForgetlessError | None]]:
    """Train runs, and hand each back when its trace is there, or with what broke it.

    Where several jobs go on at a time, the longest begin first, so that none is left over at the
    end; a run that breaks does not stop the others.
    """
    if engine.workers > 1 and any(order.config.budget == AUTO for order in orders):
        raise ConfigError(
            "--budget auto takes a share of what is free, and several jobs would all take the "
            "same; give a size such as 4GB, or --jobs 1"
        )
    with ExitStack() as stack:
        plan = {order.folder: divided(order, engine) for order in orders}
        parted = [order for order in orders if not plan[order.folder][0].whole]
        for order in parted:  # a whole run holds its folder by itself
            stack.enter_context(FolderLock(order.folder))
        jobs = [job for own in plan.values() for job in own]
        if engine.workers > 1:
            jobs.sort(key=lambda job: -job.size)
        for job in jobs:
            watch(Event("queued", job))
        replaced = {order.folder for order in parted if order.fresh}

        def watch_and_clear(event: Event) -> None:
            order = event.job.order
            if event.progress is not None and order.folder in replaced:
                replaced.remove(order.folder)  # the settings are known to be good by now
                clear(order)
            watch(event)

        over: dict[Path, dict[Job, Outcome]] = {folder: {} for folder in plan}
        for outcome in stack.enter_context(closing(engine.carry_out(jobs, watch_and_clear))):
            order = outcome.job.order
            mine, found = plan[order.folder], over[order.folder]
            found[outcome.job] = outcome
            if len(found) == len(mine):
                yield order, _finished(order, [found[job] for job in mine])


def _finished(order: Order, outcomes: Sequence[Outcome]) -> ForgetlessError | None:
    """Put the jobs of a run together, where the run is."""
    over = all(one.error is None or isinstance(one.error, TrainingError) for one in outcomes)
    if order.storage is None or not over:
        return put_together(order, outcomes)
    collect(order)
    error = put_together(order, outcomes)
    settle(order)
    return error
