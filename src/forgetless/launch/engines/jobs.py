"""Orders are divided into jobs, executed by an engine, and merged into one trace each."""

import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal, Protocol, final

import numpy as np
import torch

from forgetless.data import ScenarioOptions, build_scenario
from forgetless.launch.engines.storage import Mirror, ObjectStore, download, publish
from forgetless.launch.runs import Config, run
from forgetless.support.files import FolderLock
from forgetless.support.validation import (
    AUTO,
    ConfigError,
    ForgetlessError,
    TrainingError,
    select_options,
)
from forgetless.trace import (
    JOBS,
    TRACE_FILE,
    Keep,
    is_trace,
    load_trace,
    make_room,
    merged_seeds,
    run_status,
)
from forgetless.trace.checkpoint import CHECKPOINTS, Store
from forgetless.training.build import seed_groups
from forgetless.training.fit import resolve_device
from forgetless.training.models import build_model
from forgetless.training.settings import Observer, Progress


@final
@dataclass(frozen=True)
class Order:
    """A run to train: a scenario, a method and all its seeds.

    Arguments:
        name: for people.
        config: its settings.
        folder: where its trace goes.
        data: folder with datasets, or None.
        keep: what the trace keeps.
        checkpoint_every: minutes between checkpoints within a task.
        resume: False replaces what the folder holds, True resumes the unfinished run in it, None
            looks, and trains nothing if the run is complete.
        size: its work relative to other runs.
        shared: address of the run's folder in shared storage; `folder` is then a local copy, and
            workers train in temporary folders.
    """

    name: str
    config: Config
    folder: Path
    data: Path | None = None
    keep: Keep = "all"
    checkpoint_every: float = 5.0
    resume: bool | None = None
    size: float = 1.0
    shared: str | None = None


@final
@dataclass(frozen=True)
class Job:
    """The unit of work of one worker: a run, or one group of its seeds.

    Arguments:
        order: the run.
        seeds: the seeds to train.
        folder: where its trace goes; for a whole run the run's own.
        resume: as for an order. What it replaces stays until the settings are known to be good.
    """

    order: Order = field(hash=False)  # its settings hold a mapping; the folder tells jobs apart
    seeds: tuple[int, ...]
    folder: Path
    resume: bool | None = field(default=None, compare=False)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the run."""
        return self.folder == self.order.folder

    @property
    def name(self) -> str:
        """Its name for people."""
        seeds = "" if self.is_whole else f" seed {','.join(map(str, self.seeds))}"
        return self.order.name + seeds

    @property
    def place(self) -> str:
        """Its folder relative to the run's; empty for a whole run."""
        return "" if self.is_whole else self.folder.relative_to(self.order.folder).as_posix()

    @property
    def size(self) -> float:
        """Its work relative to other jobs."""
        return self.order.size * len(self.seeds) / len(self.order.config.seed_list())


EventKind = Literal["queued", "begun", "progress", "retried", "finished", "failed"]


@final
@dataclass(frozen=True)
class Event:
    """Something that happened to a job.

    Arguments:
        kind: what happened.
        job: to which job.
        worker: on which worker, for people; empty while there is none.
        progress: how far the job is.
        message: a sentence about what went wrong.
    """

    kind: EventKind
    job: Job
    worker: str = ""
    progress: Progress | None = None
    message: str = ""


Watch = Callable[[Event], None]


@final
@dataclass(frozen=True)
class Outcome:
    """A job that is over: finished, or failed with an error that a retry would meet again."""

    job: Job
    error: ForgetlessError | None = None


class Engine(Protocol):
    """Executes jobs.

    Attributes:
        workers: jobs at a time.
        divides: whether a run becomes one job per group of seeds.
    """

    @property
    def workers(self) -> int: ...

    @property
    def divides(self) -> bool: ...

    def device(self, name: str) -> torch.device:
        """The device of that name where jobs are executed."""
        ...

    def execute(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome]:
        """Execute jobs, roughly in their order, and yield each when it is over.

        A job whose worker dies is retried a few times. Closing the generator stops all jobs; those
        under way save a checkpoint first.
        """
        ...


@final
class InProcess:
    """Executes jobs in this process, one after another."""

    workers = 1
    divides = False  # the seeds of a run follow one another anyway

    def device(self, name: str) -> torch.device:
        return resolve_device(name)

    def execute(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome]:
        for job in jobs:
            watch(Event("begun", job))
            error = None
            try:
                execute_job(job, partial(_tell, watch, job))
            except ForgetlessError as problem:
                error = problem
            watch(Event("failed" if error else "finished", job, message=str(error or "")))
            yield Outcome(job, error)


def _tell(watch: Watch, job: Job, progress: Progress) -> None:
    watch(Event("progress", job, progress=progress))


def divide(order: Order, engine: Engine) -> list[Job]:
    """The jobs of a run: one for each group of seeds that train together.

    A run that was begun as a whole resumes as one, and one that was begun in parts in parts. A run
    with a budget is one job, since its first group of seeds decides the storage.
    """
    config, parts = order.config, order.folder / JOBS
    whole = [Job(order, config.seed_list(), order.folder, order.resume)]
    resumes = order.resume is not False
    divides = engine.divides or (resumes and parts.is_dir())
    if not divides or config.budget or (resumes and Store(order.folder / CHECKPOINTS).exists()):
        return whole
    options = select_options(ScenarioOptions, vars(config))
    shape, outputs = _shapes(config.scenario, options, order.data)
    with torch.device("meta"):  # the weights do not matter
        module = build_model(config, shape, outputs)
    groups = seed_groups(config.seed_list(), config, engine.device(config.device), module)
    if len(groups) == 1:
        return whole
    resume = False if order.resume is False else None
    return [Job(order, group, parts / _folder_name(group), resume) for group in groups]


@cache
def _shapes(name: str, options: ScenarioOptions, data: Path | None) -> tuple[tuple[int, ...], int]:
    """The shape of a scenario's inputs and its number of outputs, without keeping the images."""
    scenario = build_scenario(name, options, data)
    return tuple(scenario.input_shape), scenario.n_outputs


def _folder_name(group: tuple[int, ...]) -> str:
    return "seeds-" + (f"{group[0]}" if len(group) == 1 else f"{group[0]}-to-{group[-1]}")


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
