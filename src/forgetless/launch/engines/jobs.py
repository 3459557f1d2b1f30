"""Orders, the jobs that they are divided into, and what happens to these."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

from forgetless.launch.config import Config
from forgetless.support.errors import ForgetlessError
from forgetless.trace import Keep
from forgetless.training.settings import Progress


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
