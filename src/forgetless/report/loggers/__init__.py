"""Observers that hand a run's accuracies to TensorBoard, MLflow or Weights & Biases.

Each is called with the progress of a run (`fit(..., observer=logger)`) and closed at its end, best
as a context manager. What is logged after every task, with the task's number as the step: the
accuracy on each task, their average, and the forgetting so far, for every seed.
"""

from forgetless.report.loggers.measurements import Logger, Measurements, several
from forgetless.report.loggers.mlflow import MLflowLogger
from forgetless.report.loggers.tensorboard import TensorBoardLogger
from forgetless.report.loggers.wandb import WandbLogger

__all__ = [
    "Logger",
    "MLflowLogger",
    "Measurements",
    "TensorBoardLogger",
    "WandbLogger",
    "several",
]
