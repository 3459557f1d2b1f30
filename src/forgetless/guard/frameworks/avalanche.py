"""The guard as a plugin of Avalanche's strategies."""

from typing import Any, Unpack, final

from torch import Tensor
from torch.utils.data import DataLoader

from forgetless.guard.frameworks.base import GuardCarrier, GuardOptions
from forgetless.methods import Method

try:
    from avalanche.models import MultiTaskModule
    from avalanche.training.plugins import SupervisedPlugin
    from avalanche.training.templates import SupervisedTemplate
except ImportError as error:
    raise ImportError("this needs Avalanche: pip install 'forgetless[avalanche]'") from error


@final
class GuardPlugin(GuardCarrier, SupervisedPlugin):  # type: ignore[misc]
    """Preserves what a strategy has learned in one experience through all later ones.

    Models that take task labels are given them. Heads that Avalanche adds for later experiences
    are not protected; exclude a single head that grows by name (`exclude`).

    Arguments:
        method: as for `Guard`, for example `PCAOGD(components=100)`; by default `KronEWC()`.
        protect: data whose outputs must stay, of a pretrained model: a loader, batches or a
            dataset, stored before the first experience as `Guard.protect` does.
        options: keyword arguments of `Guard`.
    """

    def __init__(
        self,
        method: Method[Any] | None = None,
        *,
        protect: Any = None,
        **options: Unpack[GuardOptions],
    ) -> None:
        SupervisedPlugin.__init__(self)
        GuardCarrier.__init__(self, method, options, protect)

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        """Guard the optimizer, after Avalanche has fitted model and optimizer to the experience."""
        takes_labels = isinstance(strategy.model, MultiTaskModule)
        unpack = _with_task_labels if takes_labels else _without_task_labels
        # Choosing them silences the guard's warning about a later task's head, which no other
        # task moves.
        trained = [n for n, p in strategy.model.named_parameters() if p.requires_grad]
        defaults: GuardOptions = {"unpack": unpack, "params": trained}
        self._attach(strategy.model, strategy.optimizer, defaults)
        batches = self._calibration_batches(strategy.train_mb_size, strategy.experience.dataset)
        if batches is not None:
            self.guard.protect(batches)

    def before_forward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        """Show the batch to the method."""
        self.guard.observe(strategy.mbatch)

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        """Store the experience's own data, without what other plugins have mixed into it."""
        dataset = strategy.experience.dataset
        self.end_task(
            DataLoader(dataset, batch_size=strategy.train_mb_size, collate_fn=dataset.collate_fn)
        )


def _with_task_labels(batch: Any) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Inputs and task labels, and the target, of a batch (x, y, …, t)."""
    return (batch[0], batch[-1]), batch[1]


def _without_task_labels(batch: Any) -> tuple[Tensor, Tensor]:
    return batch[0], batch[1]
