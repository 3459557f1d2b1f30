"""The guard as a callback of Lightning."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Unpack, final

from forgetless.guard.frameworks.base import GuardCarrier, GuardOptions
from forgetless.methods import Method

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError("this needs Lightning: pip install 'forgetless[lightning]'") from error


_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@final
class GuardCallback(GuardCarrier, Callback):  # type: ignore[misc]
    """Preserves what a module has learned in one `fit` through all later ones.

    Give the same callback to the trainer of every task. It guards the module's optimizers, stores
    the task when `fit` ends without an error, on the trainer's training data after the hooks of
    the module or its data module that change batches. The module's `forward` returns the protected
    outputs. The numbers of `stats()` are logged as `guard_removed`, `guard_drift/task 1` and so on.

    Lightning's checkpoints have what was stored before them. The finished task is stored after the
    last one: `forgetless.safetensors` in their folder has it too, for `load` before the next task.
    Under a strategy with several processes each does the same.

    Arguments:
        method: as for `Guard`, for example `PCAOGD(components=100)`; by default `KronEWC()`.
        protect: data whose outputs must stay, of a pretrained model: a loader, batches or a
            dataset, stored before the first training as `Guard.protect` does.
        end_task: whether to store a task when `fit` ends; if not, call `end_task` yourself.
        options: keyword arguments of `Guard`, such as `unpack` if batches are not (x, y).
    """

    def __init__(
        self,
        method: Method[Any] | None = None,
        *,
        protect: Any = None,
        end_task: bool = True,
        **options: Unpack[GuardOptions],
    ) -> None:
        super().__init__(method, options, protect)
        self._ends_tasks = end_task

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Guard the optimizers that were made for this fit."""
        if trainer.ckpt_path is not None:
            self._warn_if_unguarded(str(trainer.ckpt_path))
        # The strategy's model tells which processes train it.
        self._attach(trainer.strategy.model or pl_module, trainer.optimizers)
        loader = trainer.train_dataloader
        batches = self._calibration_batches(getattr(loader, "batch_size", None), loader)
        if batches is not None:
            self.guard.protect(_after_hooks(batches, trainer, pl_module))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Show the batch to the method, after the hooks that change it."""
        self.guard.observe(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the numbers of `stats()`, as often as the trainer logs."""
        every = trainer.log_every_n_steps
        if every and trainer.global_step % every == 0:
            pl_module.log_dict(self._numbers(), on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the task, except after a `fast_dev_run`."""
        if self._ends_tasks and not trainer.fast_dev_run:
            self.end_task(_after_hooks(trainer.train_dataloader, trainer, pl_module))
            folder = getattr(trainer.checkpoint_callback, "dirpath", None)
            if folder is not None:
                self.save(Path(folder))


@final
class _Mapped:
    """A loader with each batch changed."""

    def __init__(self, loader: Iterable[Any], change: Callable[[Any], Any]) -> None:
        self.loader = loader
        self.change = change

    def __iter__(self) -> Iterator[Any]:
        return map(self.change, self.loader)


def _after_hooks(loader: Iterable[Any], trainer: Trainer, module: LightningModule) -> Iterable[Any]:
    """A loader's batches after the hooks of the module or its data module."""
    sources = [source for source in (trainer.datamodule, module) if source is not None]
    owners = {
        hook: next((source for source in sources if is_overridden(hook, source)), None)
        for hook in _HOOKS
    }
    if not any(owners.values()):
        return loader
    before, transfer, after = (getattr(owner or module, hook) for hook, owner in owners.items())
    return _Mapped(loader, lambda b: after(transfer(before(b, 0), module.device, 0), 0))
