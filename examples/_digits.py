"""Handwritten digits that come with scikit-learn, upright and rotated."""

import torch
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from torch import Tensor, nn

TRAINED_ON = 1200  # of 1,797 images


def turned(degrees: float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images (n, 64) with labels (n,), rotated by an angle."""
    images, labels = load_digits(return_X_y=True)
    images = rotate(images.reshape(-1, 8, 8) / 16, degrees, axes=(2, 1), reshape=False, order=1)
    x, y = torch.tensor(images, dtype=torch.float32).flatten(1), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAINED_ON], order[TRAINED_ON:]
    return (x[train], y[train]), (x[test], y[test])


def network() -> nn.Module:
    """64 pixels, two hidden layers, ten classes."""
    return nn.Sequential(
        nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images classified correctly, in percent."""
    return 100 * (model(images).argmax(1) == labels).float().mean().item()
