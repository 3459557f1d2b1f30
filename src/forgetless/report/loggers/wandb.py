"""Weights & Biases: one run, with the seeds in the names of the metrics."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from forgetless.report.loggers.measurements import Logger, package


@final
class WandbLogger(Logger):
    """Logs metrics such as `seed 0/average accuracy` to a Weights & Biases run.

    Arguments:
        project: its name.
        name: of the run.
        folder: where files go; by default where wandb puts them.
        mode: "offline" needs no account: `wandb sync` can send the files later. "online" sends
            them while the run goes on.
        config: settings to note with the run.
    """

    def __init__(
        self,
        project: str = "forgetless",
        *,
        name: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        mode: str = "offline",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        where = None if folder is None else str(folder)
        if where is not None:
            Path(where).mkdir(parents=True, exist_ok=True)
        self._run = package("wandb", "wandb").init(
            project=project, name=name, dir=where, mode=mode, config=dict(config or {})
        )
        # Seeds may come one after another, so that the task and not the call is the step.
        self._run.define_metric("task")
        self._run.define_metric("*", step_metric="task")

    @property
    def folder(self) -> Path:
        """The folder with the run's files."""
        return Path(self._run.dir).parent

    def write(self, seed: int, task: int, numbers: dict[str, float]) -> None:
        """All numbers of a task at once."""
        named = {f"seed {seed}/{name}": value for name, value in numbers.items()}
        self._run.log(named | {"task": task})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
