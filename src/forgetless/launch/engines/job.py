"""What an engine is given, what it says while it works, and what it hands back."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, final

import torch

from forgetless.launch.config import Config
from forgetless.support.errors import ForgetlessError
from forgetless.training.fit import Keep
from forgetless.training.settings import Progress


@final
@dataclass(frozen=True)
class Order:
    """One run that is to be trained: a scenario, a method, and all its seeds.

    Arguments:
        name: what people call it.
        config: its settings.
        folder: where its trace goes.
        data: folder with datasets, or None.
        keep: what the trace keeps.
        checkpoint_every: minutes between checkpoints within a task.
        fresh: whether what the folder holds is replaced; otherwise the run goes on from it.
        size: how much work it is beside others.
        storage: address of the run's folder in shared storage; `folder` is then what this machine
            has of it, and workers train in folders of their own.
    """

    name: str
    config: Config
    folder: Path
    data: Path | None = None
    keep: Keep = "all"
    checkpoint_every: float = 5.0
    fresh: bool = False
    size: float = 1.0
    storage: str | None = None


@final
@dataclass(frozen=True)
class Job:
    """What one worker does at a time: a run, or one group of its seeds.

    Arguments:
        order: the run.
        seeds: the seeds that it is about.
        folder: where its trace goes; for a whole run the run's own.
        fresh: whether what the folder holds is replaced, once the settings are known to be good.
    """

    order: Order = field(hash=False)  # its settings hold a mapping; the folder tells jobs apart
    seeds: tuple[int, ...]
    folder: Path
    fresh: bool = field(default=False, compare=False)

    @property
    def whole(self) -> bool:
        """Whether it is all of the run."""
        return self.folder == self.order.folder

    @property
    def name(self) -> str:
        """What people call it."""
        if self.whole:
            return self.order.name
        return f"{self.order.name} seed {','.join(map(str, self.seeds))}"

    @property
    def place(self) -> str:
        """Where in the run's folder its own is; empty for a whole run."""
        return "" if self.whole else self.folder.relative_to(self.order.folder).as_posix()

    @property
    def size(self) -> float:
        """How much work it is beside others."""
        return self.order.size * len(self.seeds) / len(self.order.config.seed_list())


Kind = Literal["queued", "begun", "progress", "retried", "finished", "failed"]


@final
@dataclass(frozen=True)
class Event:
    """Something that happened to a job.

    Arguments:
        kind: what.
        job: to which.
        worker: where, for people; empty while it is nowhere yet.
        progress: how far it is.
        words: a sentence about what went wrong.
    """

    kind: Kind
    job: Job
    worker: str = ""
    progress: Progress | None = None
    words: str = ""


Watch = Callable[[Event], None]


@final
@dataclass(frozen=True)
class Outcome:
    """A job that is over: carried out, or ended by an error that would come again."""

    job: Job
    error: ForgetlessError | None = None


class Engine(Protocol):
    """Carries out jobs.

    Attributes:
        workers: how many jobs at a time.
        divides: whether the seeds of a run are worth a job for each group of them.
    """

    @property
    def workers(self) -> int: ...

    @property
    def divides(self) -> bool: ...

    def device(self, name: str) -> torch.device:
        """What the device of that name is for a job, wherever it will be carried out."""
        ...

    def carry_out(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome]:
        """Carry out jobs in about their order, and hand each back when it is over.

        A job whose worker dies is begun again elsewhere, a few times. Whoever stops asking for
        the next one stops them all, and those under way save where they are.
        """
        ...
