"""A Lightning module learns digits, then digits rotated by 60°; the guard is one callback.

The same module, data, learning rate and epochs with and without the guard. Test accuracies in
percent:

                         upright  turned
    after upright           93.0    18.6
    turned, unguarded       41.0    92.8
    turned, guarded         76.7    91.8
"""

import copy
import logging
import warnings

import _digits
import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from forgetless import PCAOGD
from forgetless.guard.frameworks.lightning import GuardCallback


class Classifier(lightning.LightningModule):
    """An ordinary Lightning module, independent of the guard."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _digits.network()

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(module: Classifier, images: Tensor, labels: Tensor, callbacks=()) -> None:
    """Train for twenty epochs, on the same batches each time."""
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=20,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True))


def main() -> None:
    """Learn upright digits, then rotated ones with and without the guard, and compare."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(0)
    upright, upright_test = _digits.turned(0)
    turned, turned_test = _digits.turned(60)
    module = Classifier()
    guard = GuardCallback(PCAOGD(components=300, samples=1200))

    fit(module, *upright, callbacks=[guard])
    unguarded = copy.deepcopy(module)
    before = _digits.accuracy(module, *upright_test)
    print(f"{'':20}{'upright':>8}{'turned':>8}")
    print(f"{'after upright':20}{before:8.1f}{_digits.accuracy(module, *turned_test):8.1f}")

    fit(unguarded, *turned)
    fit(module, *turned, callbacks=[guard])
    free, free_turned = (_digits.accuracy(unguarded, *t) for t in (upright_test, turned_test))
    kept, kept_turned = (_digits.accuracy(module, *t) for t in (upright_test, turned_test))
    print(f"{'turned, unguarded':20}{free:8.1f}{free_turned:8.1f}")
    print(f"{'turned, guarded':20}{kept:8.1f}{kept_turned:8.1f}")

    cut = 1 - (before - kept) / (before - free)
    cost = free_turned - kept_turned
    print(f"The guard cuts forgetting by {cut:.0%}, at a cost of {cost:.1f} points.")
    assert cut > 0.5, "the guard must halve forgetting"
    assert cost < 3, "rotated digits must lose no more than three points"


if __name__ == "__main__":
    main()
