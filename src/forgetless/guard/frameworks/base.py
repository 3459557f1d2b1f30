"""A guard for frameworks that own the loop, the optimizer and the checkpoints."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from forgetless.guard.batches.outputs import Named, Output
from forgetless.guard.batches.samples import Unpack
from forgetless.guard.distributed.sharding import gathered
from forgetless.guard.guard import Guard
from forgetless.guard.history import NumberLogger
from forgetless.guard.model import unwrapped
from forgetless.guard.parameters import Params
from forgetless.guard.report import Stats
from forgetless.guard.steps import Projected
from forgetless.methods import Method
from forgetless.subspace import Storage
from forgetless.support.files import write_atomically
from forgetless.support.validation import (
    ConfigError,
    DataError,
    ForgetlessWarning,
    did_you_mean,
    first_line,
)

FILE = "forgetless.safetensors"  # what a guard remembers, next to a model's weights


class GuardOptions(TypedDict, total=False):
    """The keyword arguments of `Guard`, which explains them."""

    params: Params
    exclude: str | Sequence[str]
    project: Projected | None
    output: Named | Output | None
    loss: Output | None
    unpack: Unpack | None
    storage: str | Storage | None
    budget: str | int | None
    max_rank: int | None
    freeze_batch_norm: bool
    process_group: Any
    drift_samples: int
    progress: bool
    log: str | NumberLogger | None
    seed: int


class GuardCarrier:
    """A callback that creates a guard for the framework's optimizer and carries it through tasks.

    Arguments:
        method: as for `Guard`.
        options: keyword arguments of `Guard`.
        protect: data for `Guard.protect` before training begins; None for a model that has
            learned nothing to keep.
    """

    def __init__(
        self, method: Method[Any] | None, options: GuardOptions, protect: Any = None
    ) -> None:
        # A misspelt option should not wait for the training to begin.
        known = GuardOptions.__annotations__
        for name in sorted(options.keys() - known.keys()):
            meant = did_you_mean(name, known) or "; those of a method are given to it: KronEWC(…)"
            raise TypeError(f"a guard has no option {name!r}{meant}")
        self._method = method
        self._options = options
        self._calibration = protect
        self._guard: Guard | None = None
        self._protected: dict[str, Tensor] = {}
        self._loaded: Mapping[str, Tensor] = {}  # a state for the guard to come
        self._loaded_from: Path | None = None
        self._was_loaded = False

    @property
    def guard(self) -> Guard:
        """The guard, once training has begun."""
        if self._guard is None:
            raise ConfigError("there is no guard yet: it is made when training begins")
        return self._guard

    def end_task(self, loader: Any, held_out: Any = None) -> None:
        """Store the task that was just learned, on data that `Guard.end_task` takes."""
        self.guard.end_task(loader, held_out)

    def stats(self) -> Stats:
        """How much of this training's steps was removed; after its end, of the finished task's."""
        return self.guard.stats()

    def save(self, folder: str | Path) -> None:
        """Write all that is stored to `forgetless.safetensors` in a folder.

        Of a model that several processes train, each calls it and the first one writes.
        """
        self._save(Path(folder))

    def load(self, folder: str | Path) -> None:
        """Continue from what `save` wrote, at the latest when training begins."""
        file = Path(folder) / FILE
        try:
            state = load_file(file)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file} cannot be read: {first_line(error)}") from error
        self.load_state_dict(state)
        self._loaded_from = file

    def state_dict(self) -> dict[str, Tensor]:
        """All that is stored; empty before training."""
        return dict(self._loaded) if self._guard is None else self._guard.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`, at the latest when training begins."""
        self._was_loaded = True
        if self._guard is None:
            self._loaded = state_dict
        elif state_dict:
            self._guard.load_state_dict(state_dict)

    def _save(self, *folders: Path, metadata: dict[str, str] | None = None) -> None:
        tensors = {name: gathered(t).cpu() for name, t in self.state_dict().items()}
        ranks = None if self._guard is None else self._guard.ranks
        for folder in folders if ranks is None or ranks.rank == 0 else ():
            write_atomically(folder / FILE, lambda file: save_file(tensors, file, metadata))
        if ranks is not None:
            ranks.sum(torch.zeros(1))  # all may read it from here on

    @property
    def _has_memory(self) -> bool:
        """Whether a state was loaded, or a task stored in this process."""
        return self._was_loaded or (self._guard is not None and self._guard.tasks > 0)

    def _calibration_batches(self, batch_size: int | None, train_loader: Any) -> Any:
        """The data to protect before training, None if there is none or a task is stored already.

        Arguments:
            batch_size: of a dataset's batches.
            train_loader: tells how a dataset's samples are put into batches.
        """
        data: Any = None if self.guard.tasks else self._calibration
        is_list = isinstance(data, list | tuple | Mapping | Tensor)
        if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and not is_list):
            collate = getattr(train_loader, "collate_fn", None)
            return DataLoader(data, batch_size=batch_size or 1, collate_fn=collate)
        return data

    def _warn_if_unguarded(self, where: str) -> None:
        """Warn of training that resumes without what a guard stored before."""
        if not self._has_memory:
            warnings.warn(
                f"training resumes, and nothing that a guard stored is in {where}: earlier tasks "
                f"are not protected. If there were any, call load(folder) before training, with "
                f"the folder that has their {FILE}",
                ForgetlessWarning,
                stacklevel=3,
            )

    def _numbers(self) -> dict[str, float]:
        """The numbers of `stats()` for a logger; empty before a task is stored."""
        now = self.guard.stats()
        found = now.metrics() if self.guard.tasks else {}
        return {f"guard_{name}": value for name, value in found.items()}

    def _attach(
        self, model: nn.Module, optimizer: Any, defaults: GuardOptions | None = None
    ) -> None:
        """Guard an optimizer's steps from now on, with all tasks stored so far.

        Arguments:
            model: the model, the same as before or another of the same shape.
            optimizer: its optimizer, new or not.
            defaults: options that the user's override.
        """
        parameters = dict(unwrapped(model).named_parameters())
        known = self._protected.items()
        guard = self._guard
        if guard is not None and guard.tasks and guard.has_grown(model, optimizer):
            guard.adopt(model, optimizer)
            self._protected = {name: parameters[name] for name in guard.names}
            return
        if guard is not None and all(parameters.get(name) is tensor for name, tensor in known):
            guard.attach(optimizer)
            return
        stored = self.state_dict()
        if self._guard is not None:
            self._guard.remove()
        options: GuardOptions = {**(defaults or {}), **self._options}
        guard = Guard(model, optimizer, self._method, **options)
        if stored:
            try:
                guard.load_state_dict(stored)
            except ConfigError as error:
                if self._loaded_from is None or self._guard is not None:
                    raise
                raise ConfigError(f"{self._loaded_from} does not fit: {error}") from error
        self._guard, self._loaded = guard, {}
        self._protected = {name: parameters[name] for name in guard.names}
