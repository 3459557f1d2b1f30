"""The networks of the paper, for any image shape. All heads of a task sequence are one last layer.

A head per task is a slice of that layer's outputs: a sample of task t only ever sees the logits of
task t's classes. `HEAD` is the layer's name, the part that belongs to single tasks.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from forgetless.support.errors import ConfigError
from forgetless.support.options import check_options, flag, option
from forgetless.support.validation import whole

HEAD = "head"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which network."""

    model: str = option("mlp", "The network; `forgetless list` shows them.")
    hidden: int = option(
        100, "Width of the hidden layers (of LeNet: of its linear layer).", accepted=whole(1)
    )


class MLP(nn.Sequential):
    """Two hidden ReLU layers, as the paper uses on MNIST: inputs (n, *) → logits (n, outputs)."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        body = nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        super().__init__(OrderedDict({"body": body, HEAD: nn.Linear(hidden, outputs)}))


class LeNet(nn.Sequential):
    """Two convolutions with batch norm, one linear layer: images (n, c, h, w) → (n, outputs)."""

    def __init__(self, shape: Sequence[int], hidden: int, outputs: int) -> None:
        channels, height, width = shape
        convolutions = nn.Sequential(
            *_convolution(channels, 20), *_convolution(20, 50), nn.Flatten()
        )
        flat = 50 * (height // 4) * (width // 4)
        body = nn.Sequential(nn.Linear(flat, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
        head = nn.Linear(hidden, outputs)
        super().__init__(OrderedDict({"convolutions": convolutions, "body": body, HEAD: head}))


def _convolution(channels: int, filters: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, filters, kernel_size=5, padding=2)
    return [convolution, nn.BatchNorm2d(filters), nn.ReLU(), nn.MaxPool2d(2)]


def _mlp(shape: Sequence[int], hidden: int, outputs: int) -> nn.Module:
    return MLP(int(torch.Size(shape).numel()), hidden, outputs)


def _lenet(shape: Sequence[int], hidden: int, outputs: int) -> nn.Module:
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise ConfigError(f"lenet needs images of at least 4x4 pixels, not inputs of {shape}")
    return LeNet(shape, hidden, outputs)


MODELS: dict[str, tuple[str, Callable[[Sequence[int], int, int], nn.Module]]] = {
    "mlp": ("two hidden ReLU layers (the paper's MNIST network)", _mlp),
    "lenet": ("two convolutions with batch norm, one linear layer (the paper's CIFAR one)", _lenet),
}


def build_model(options: ModelOptions, shape: Sequence[int], outputs: int) -> nn.Module:
    """The network of that name for inputs of one shape, initialised from torch's generator."""
    check_options(ModelOptions, vars(options), flag)
    if options.model not in MODELS:
        raise ConfigError(f"unknown model {options.model!r}; there are {', '.join(MODELS)}")
    return MODELS[options.model][1](shape, options.hidden, outputs)
