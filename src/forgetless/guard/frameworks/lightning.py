"""The guard as a callback of Lightning."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack, final

from forgetless.guard.frameworks.base import GuardCarrier, GuardOptions, require_one_process
from forgetless.methods import Method
from forgetless.support.errors import ConfigError

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError("this needs Lightning: pip install 'forgetless[lightning]'") from error


_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@final
class GuardCallback(GuardCarrier, Callback):  # type: ignore[misc]
    """Preserves what a module has learned in one `fit` through all later ones.

    Give the same callback to the trainer of every task. It guards the module's optimizer, stores
    the task when `fit` ends without an error, on the trainer's training data after the hooks of
    the module or its data module that change batches, and is saved in Lightning's checkpoints. The
    module's `forward` returns the protected outputs.

    Arguments:
        method: as for `Guard`, for example `PCAOGD(components=100)`.
        end_task: whether to store a task when `fit` ends; if not, call `end_task` yourself.
        options: keyword arguments of `Guard`, such as `unpack` if batches are not (x, y).
    """

    def __init__(
        self, method: Method[Any], *, end_task: bool = True, **options: Unpack[GuardOptions]
    ) -> None:
        super().__init__(method, options)
        self._ends_tasks = end_task

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Guard the optimizer that was made for this fit."""
        count = len(trainer.optimizers)
        if count != 1:
            raise ConfigError(f"the guard is for one optimizer; configure_optimizers made {count}")
        if self._ends_tasks:
            require_one_process(trainer.world_size, type(self).__name__)
        self._attach(pl_module, trainer.optimizers[0])

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Show the batch to the method, after the hooks that change it."""
        self.guard.observe(batch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the task, except after a `fast_dev_run`."""
        if self._ends_tasks and not trainer.fast_dev_run:
            self.end_task(_training_batches(trainer, pl_module))


@final
class _Mapped:
    """A loader with each batch changed."""

    def __init__(self, loader: Iterable[Any], change: Callable[[Any], Any]) -> None:
        self.loader = loader
        self.change = change

    def __iter__(self) -> Iterator[Any]:
        return map(self.change, self.loader)


def _training_batches(trainer: Trainer, module: LightningModule) -> Iterable[Any]:
    """The training data after the hooks of the module or its data module."""
    sources = [source for source in (trainer.datamodule, module) if source is not None]
    owners = {
        hook: next((source for source in sources if is_overridden(hook, source)), None)
        for hook in _HOOKS
    }
    loader: Iterable[Any] = trainer.train_dataloader
    if not any(owners.values()):
        return loader
    before, transfer, after = (getattr(owner or module, hook) for hook, owner in owners.items())
    return _Mapped(loader, lambda b: after(transfer(before(b, 0), module.device, 0), 0))
