"""Observers that send a run's accuracies to TensorBoard, MLflow or Weights & Biases.

Each is called with the progress of a run (`fit(..., observer=logger)`) and closed at its end, best
as a context manager. After every task, with the task's number as the step, it logs the accuracy
on each task, their average, and the forgetting so far, for every seed.
"""

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, final

from forgetless.support.validation import ConfigError
from forgetless.training.settings import Measurements, Progress


class Logger(ABC):
    """An observer that writes numbers somewhere, and has to be closed."""

    def __init__(self) -> None:
        self._measurements = Measurements()

    @abstractmethod
    def write(self, seed: int, task: int, numbers: dict[str, float]) -> None:
        """Write the new numbers of a seed after a task (from 1)."""

    @abstractmethod
    def close(self) -> None:
        """Finish: nothing is written after it."""

    def __call__(self, progress: Progress) -> None:
        for seed, task, numbers in self._measurements.new(progress):
            self.write(seed, task, numbers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def package(module: str, install: str) -> Any:
    """An optional package; without it, an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"this logger needs {install}: pip install {install}") from error


@final
class TensorBoardLogger(Logger):
    """Writes event files under a folder, `seed-0`, `seed-1` and so on.

    Arguments:
        folder: the one given to `tensorboard --logdir`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        package("tensorboard", "tensorboard")
        self._writer = package("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._folder = Path(folder)
        self._open: dict[int, Any] = {}

    def write(self, seed: int, task: int, numbers: dict[str, float]) -> None:
        """One event per number; the step is the task's number."""
        if seed not in self._open:
            self._open[seed] = self._writer(str(self._folder / f"seed-{seed}"))
        for name, value in numbers.items():
            self._open[seed].add_scalar(name, value, task)

    def close(self) -> None:
        """Flush and close the event files."""
        for writer in self._open.values():
            writer.close()
        self._open.clear()


@final
class MLflowLogger(Logger):
    """Logs metrics such as `seed 0/average accuracy` to a tracking server or a folder.

    Arguments:
        experiment: its name; made if there is none.
        tracking_uri: of the server; MLflow's own setting by default.
        name: of the run.
        params: settings to log with it, such as `trace.config`.
    """

    def __init__(
        self,
        experiment: str = "forgetless",
        *,
        tracking_uri: str | None = None,
        name: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        tracking = package("mlflow.tracking", "mlflow-skinny")
        # The client, not mlflow's fluent functions: they hold one active run per process.
        self._client = tracking.MlflowClient(tracking_uri)
        known = self._client.get_experiment_by_name(experiment)
        number = (
            self._client.create_experiment(experiment) if known is None else known.experiment_id
        )
        self._run = self._client.create_run(number, run_name=name).info.run_id
        for key, value in (params or {}).items():
            self._client.log_param(self._run, key, value)

    @property
    def run_id(self) -> str:
        """MLflow's id of the run."""
        return str(self._run)

    def write(self, seed: int, task: int, numbers: dict[str, float]) -> None:
        """One metric per number; the step is the task's number."""
        for name, value in numbers.items():
            self._client.log_metric(self._run, f"seed {seed}/{name}", value, step=task)

    def close(self) -> None:
        """End the MLflow run."""
        self._client.set_terminated(self._run)


@final
class WandbLogger(Logger):
    """Logs metrics such as `seed 0/average accuracy` to a Weights & Biases run.

    Arguments:
        project: its name.
        name: of the run.
        folder: for the files; wandb's own by default.
        mode: "offline" needs no account: `wandb sync` can send the files later. "online" sends
            them during the run.
        config: settings to log with the run.
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
        # Seeds may come one after another, so the step is the task and not the call.
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
