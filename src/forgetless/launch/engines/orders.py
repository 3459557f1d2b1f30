"""Orders are divided into jobs, executed by an engine, and merged into one trace each."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from forgetless.launch.engines.dividing import divide
from forgetless.launch.engines.engine import Engine
from forgetless.launch.engines.jobs import Event, Job, Order, Outcome, Watch
from forgetless.launch.engines.merging import merge
from forgetless.support.errors import ConfigError, ForgetlessError
from forgetless.support.options import AUTO
from forgetless.trace import make_room
from forgetless.trace.checkpoint import CHECKPOINTS, Store
from forgetless.trace.lock import FolderLock


def train(
    orders: Sequence[Order], engine: Engine, watch: Watch
) -> Generator[tuple[Order, ForgetlessError | None]]:
    """Train runs; yield each when its trace is written, or with the error that stopped it.

    With several workers the longest jobs begin first. A run that fails does not stop the others.
    """
    if engine.workers > 1 and any(order.config.budget == AUTO for order in orders):
        raise ConfigError(
            "--budget auto takes a share of what is free, and several jobs would all take the "
            "same; give a size such as 4GB, or --jobs 1"
        )
    with ExitStack() as stack:
        plan = {order.folder: divide(order, engine) for order in orders}
        divided = [order for order in orders if not plan[order.folder][0].is_whole]
        for order in divided:  # a whole run locks its folder by itself
            stack.enter_context(FolderLock(order.folder))
        jobs = [job for own in plan.values() for job in own]
        if engine.workers > 1:
            jobs.sort(key=lambda job: -job.size)
        for job in jobs:
            watch(Event("queued", job))
        replaced = {order.folder for order in divided if order.resume is False}

        def watch_and_clear(event: Event) -> None:
            folder = event.job.order.folder
            if event.progress is not None and folder in replaced:  # the settings are good
                replaced.remove(folder)
                make_room(folder, overwrite=True)
                Store(folder / CHECKPOINTS).remove()
            watch(event)

        outcomes: dict[Path, dict[Job, Outcome]] = {folder: {} for folder in plan}
        for outcome in stack.enter_context(closing(engine.execute(jobs, watch_and_clear))):
            order = outcome.job.order
            own, found = plan[order.folder], outcomes[order.folder]
            found[outcome.job] = outcome
            if len(found) == len(own):
                yield order, merge(order, [found[job] for job in own])
