"""TensorBoard: one run a seed, so that its own curves lie over each other."""

import os
from pathlib import Path
from typing import Any, final

from forgetless.report.loggers.measurements import Logger, package


@final
class TensorBoardLogger(Logger):
    """Writes event files under a folder, `seed-0`, `seed-1` and so on.

    Arguments:
        folder: what `tensorboard --logdir` is given.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        package("tensorboard", "tensorboard")
        self._writer = package("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._folder = Path(folder)
        self._open: dict[int, Any] = {}

    def write(self, seed: int, task: int, numbers: dict[str, float]) -> None:
        """One event a number, at the task's number as the step."""
        if seed not in self._open:
            self._open[seed] = self._writer(str(self._folder / f"seed-{seed}"))
        for name, value in numbers.items():
            self._open[seed].add_scalar(name, value, task)

    def close(self) -> None:
        """Flush and close the event files."""
        for writer in self._open.values():
            writer.close()
        self._open.clear()
