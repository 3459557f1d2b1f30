"""The guard as a plugin of Avalanche's strategies."""

from typing import Any, Unpack, final

from torch import Tensor
from torch.utils.data import DataLoader

from forgetless.guard import Guard
from forgetless.guard.frameworks.keeper import GuardOptions, Keeper
from forgetless.methods import Method

try:
    from avalanche.models import MultiTaskModule
    from avalanche.training.plugins import SupervisedPlugin
    from avalanche.training.templates import SupervisedTemplate
except ImportError as error:
    raise ImportError("this needs Avalanche: pip install 'forgetless[avalanche]'") from error


@final
class GuardPlugin(SupervisedPlugin):  # type: ignore[misc]
    """Keeps what a strategy has learned in one experience through all that follow.

    Models that take task labels are given them; heads that Avalanche adds for later experiences are
    left to their own task. A head that grows instead is to be left out by name (`exclude`).

    Arguments:
        method: as `Guard` takes it, for example `PCAOGD(components=100)`.
        options: keyword arguments of `Guard`.
    """

    def __init__(self, method: Method[Any], **options: Unpack[GuardOptions]) -> None:
        super().__init__()
        self._keeper = Keeper(method, options)

    @property
    def guard(self) -> Guard:
        """The guard, once training has begun."""
        return self._keeper.guard

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        """Guard the optimizer, after Avalanche has fitted model and optimizer to the experience."""
        takes_labels = isinstance(strategy.model, MultiTaskModule)
        unpack = _with_task_labels if takes_labels else _without_task_labels
        # Of a head that comes with a later task the guard need not warn: no other task moves it.
        trained = [n for n, p in strategy.model.named_parameters() if p.requires_grad]
        defaults: GuardOptions = {"unpack": unpack, "params": trained}
        self._keeper.watch(strategy.model, strategy.optimizer, defaults)

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        """Remember the experience, without what other plugins have mixed into it."""
        dataset = strategy.experience.dataset
        self._keeper.end_task(
            DataLoader(dataset, batch_size=strategy.train_mb_size, collate_fn=dataset.collate_fn)
        )

    def state_dict(self) -> dict[str, Tensor]:
        """All that is remembered."""
        return self._keeper.state_dict()

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Go on from what `state_dict` gave, as soon as training begins."""
        self._keeper.load_state_dict(state_dict)


def _with_task_labels(batch: Any) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Inputs and task labels, and the target, of a batch (x, y, …, t)."""
    return (batch[0], batch[-1]), batch[1]


def _without_task_labels(batch: Any) -> tuple[Tensor, Tensor]:
    return batch[0], batch[1]
