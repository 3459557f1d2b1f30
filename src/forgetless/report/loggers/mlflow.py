"""MLflow: one run, with the seeds in the names of the metrics."""

from collections.abc import Mapping
from typing import Any, final

from forgetless.report.loggers.measurements import Logger, package


@final
class MLflowLogger(Logger):
    """Logs metrics such as `seed 0/average accuracy` to a tracking server or a folder.

    Arguments:
        experiment: its name; made if there is none.
        tracking_uri: where to; by default where MLflow is set to.
        name: of the run.
        params: settings to note with it, such as `trace.config`.
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
        # The client, not mlflow's fluent functions: they keep an active run for the whole process.
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
        """What MLflow calls the run."""
        return str(self._run)

    def write(self, seed: int, task: int, numbers: dict[str, float]) -> None:
        """One metric a number, at the task's number as the step."""
        for name, value in numbers.items():
            self._client.log_metric(self._run, f"seed {seed}/{name}", value, step=task)

    def close(self) -> None:
        """Tell MLflow that the run has ended."""
        self._client.set_terminated(self._run)
