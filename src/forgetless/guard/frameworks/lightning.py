"""The guard as a callback of Lightning."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack, final

from forgetless.guard import Guard
from forgetless.guard.frameworks.keeper import GuardOptions, Keeper
from forgetless.methods import Method
from forgetless.support.errors import ConfigError

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError("this needs Lightning: pip install 'forgetless[lightning]'") from error


_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def _as_trained(trainer: Trainer, module: LightningModule) -> Iterable[Any]:
    """The training data as the module was given them: after its or its data module's hooks."""
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


@final
class _Mapped:
    """What a loader gives, each batch changed, as often as it is walked through."""

    def __init__(self, loader: Iterable[Any], change: Callable[[Any], Any]) -> None:
        self.loader = loader
        self.change = change

    def __iter__(self) -> Iterator[Any]:
        return map(self.change, self.loader)


@final
class GuardCallback(Callback):  # type: ignore[misc]
    """Keeps what a module has learned in one `fit` through all that follow.

    Give the same callback to the trainer of every task. It guards the module's optimizer, remembers
    the task on the trainer's training data when `fit` ends without an error, after the hooks of the
    module or its data module that change batches, and goes into Lightning's checkpoints and out of
    them. The module's `forward` gives the protected outputs.

    Arguments:
        method: as `Guard` takes it, for example `PCAOGD(components=100)`.
        end_task: whether a task is remembered when `fit` ends; if not, call `end_task` yourself.
        options: keyword arguments of `Guard`, such as `unpack` where batches are not (x, y).
    """

    def __init__(
        self, method: Method[Any], *, end_task: bool = True, **options: Unpack[GuardOptions]
    ) -> None:
        self._keeper = Keeper(method, options)
        self._ends_tasks = end_task

    @property
    def guard(self) -> Guard:
        """The guard, once training has begun."""
        return self._keeper.guard

    def end_task(self, loader: Any) -> None:
        """Remember the task that was just learned, on data that `Guard.end_task` takes."""
        self._keeper.end_task(loader)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Guard the optimizer that was made for this fit."""
        count = len(trainer.optimizers)
        if count != 1:
            raise ConfigError(f"the guard is for one optimizer; configure_optimizers made {count}")
        if self._ends_tasks and trainer.world_size > 1:
            raise ConfigError(
                "each process would remember other samples: with several processes use "
                "GuardCallback(…, end_task=False) and call end_task with the same data in each"
            )
        self._keeper.watch(pl_module, trainer.optimizers[0])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the task; a `fast_dev_run` teaches nothing worth it."""
        if self._ends_tasks and not trainer.fast_dev_run:
            self.end_task(_as_trained(trainer, pl_module))

    def state_dict(self) -> dict[str, Any]:
        return self._keeper.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._keeper.load_state_dict(state_dict)
