"""Loggers that send numbers to TensorBoard, MLflow or Weights & Biases.

Each is called with the progress of a run (`fit(..., observer=logger)`) and closed at its end, best
as a context manager. After every task, with the task's number as the step, it logs the accuracy
on each task, their average, and the forgetting so far, for every seed. A guard gives it the numbers
of its own `metrics()` (`Guard(..., log=logger)`), with the number of steps taken.
"""

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, final

from forgetless.support.validation import ConfigError, require
from forgetless.training.settings import Measurements, Progress


class Logger(ABC):
    """An observer that writes numbers somewhere, and has to be closed."""

    def __init__(self) -> None:
        self._measurements = Measurements()

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float], group: str = "") -> None:
        """Write numbers.

        Arguments:
            step: when they were measured.
            numbers: by name.
            group: what they have in common, such as a seed.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish: nothing is written after it."""

    def __call__(self, progress: Progress) -> None:
        for seed, task, numbers in self._measurements.new(progress):
            self.log(task, numbers, f"seed {seed}")

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
    """Writes event files under a folder; those of a run to `seed-0`, `seed-1` and so on.

    Arguments:
        folder: the one given to `tensorboard --logdir`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        package("tensorboard", "tensorboard")
        self._writer = package("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._folder = Path(folder)
        self._open: dict[str, Any] = {}

    def log(self, step: int, numbers: Mapping[str, float], group: str = "") -> None:
        """One event per number; a group has a folder of its own."""
        if group not in self._open:
            self._open[group] = self._writer(str(self._folder / group.replace(" ", "-")))
        for name, value in numbers.items():
            self._open[group].add_scalar(name, value, step)

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

    def log(self, step: int, numbers: Mapping[str, float], group: str = "") -> None:
        """One metric per number."""
        for name, value in _named(numbers, group).items():
            self._client.log_metric(self._run, name, value, step=step)

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
        step: what the numbers are drawn over: the "task" of a run, or a guard's "step".
    """

    def __init__(
        self,
        project: str = "forgetless",
        *,
        name: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        mode: str = "offline",
        config: Mapping[str, Any] | None = None,
        step: str = "task",
    ) -> None:
        super().__init__()
        self._step = step
        where = None if folder is None else str(folder)
        if where is not None:
            Path(where).mkdir(parents=True, exist_ok=True)
        self._run = package("wandb", "wandb").init(
            project=project, name=name, dir=where, mode=mode, config=dict(config or {})
        )
        # Seeds may come one after another, so the step is not the number of the call.
        self._run.define_metric(step)
        self._run.define_metric("*", step_metric=step)

    @property
    def folder(self) -> Path:
        """The folder with the run's files."""
        return Path(self._run.dir).parent

    def log(self, step: int, numbers: Mapping[str, float], group: str = "") -> None:
        """All numbers of a step at once."""
        self._run.log(_named(numbers, group) | {self._step: step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _named(numbers: Mapping[str, float], group: str) -> dict[str, float]:
    return {f"{group}/{name}" if group else name: value for name, value in numbers.items()}


# From a folder for files, the run's name, its settings and what a step is called, to the logger.
LOGGERS: dict[str, Callable[[Path, str, Mapping[str, Any], str], Logger]] = {
    "tensorboard": lambda folder, name, config, step: TensorBoardLogger(folder / "tensorboard"),
    "mlflow": lambda folder, name, config, step: MLflowLogger(name=name, params=config),
    "wandb": lambda folder, name, config, step: WandbLogger(
        name=name, folder=folder, config=config, step=step
    ),
}


def logger_names(log: str, argument: str = "--log") -> list[str]:
    """The names of LOGGERS in a text, checked.

    Arguments:
        log: names, comma-separated.
        argument: what the user calls it.
    """
    names = [name.strip() for name in log.split(",") if name.strip()]
    good = all(name in LOGGERS for name in names) and len(set(names)) == len(names)
    wrong = next((name for name in names if name not in LOGGERS), log)
    accepted = f"one or more of {', '.join(LOGGERS)}, comma-separated"
    require(good, argument, wrong, accepted, LOGGERS)
    return names
