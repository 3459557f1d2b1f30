"""The networks: the paper's two, and any other by name, with the options that they take."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter
from typing import Any, final

import torch
from torch import nn

from forgetless.support.plugins import (
    accepted,
    import_path,
    is_in_file,
    make,
    plugin,
    short_name,
    wrong_kind,
)
from forgetless.support.streams import global_stream
from forgetless.support.validation import (
    ConfigError,
    check_options,
    first_line,
    flag,
    option,
    require,
    whole,
)

HEAD = "head"
ModelSource = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which network."""

    model: str = option(
        "mlp", "The network; `forgetless list` shows them. Or your own, my_file.py:MLP."
    )
    hidden: int = option(
        100, "Width of the hidden layers (of LeNet: of its linear layer).", accepted=whole(1)
    )


@final
@dataclass(frozen=True)
class ModelFactory:
    """Makes the network that options name, for inputs of one shape."""

    options: ModelOptions
    shape: tuple[int, ...]
    outputs: int

    def __call__(self) -> nn.Module:
        return build_model(self.options, self.shape, self.outputs)

    @property
    def maker(self) -> Any:
        """The function or class that makes the network."""
        return _maker(self.options.model)


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
    maker = _maker(options.model)
    if options.model in MODELS:
        return MODELS[options.model][1](shape, options.hidden, outputs)
    if isinstance(maker, nn.Module):
        return copy.deepcopy(maker)
    inputs = int(torch.Size(shape).numel())
    offered = {"shape": tuple(shape), "inputs": inputs, "outputs": outputs}
    made = make("model", options.model, maker, offered | {"hidden": options.hidden})
    if not isinstance(made, nn.Module):
        wanted = "a torch.nn.Module or a function that returns one"
        raise wrong_kind("model", options.model, made, wanted)
    return made


def make_model(model: ModelSource, seed: int) -> nn.Module:
    """A fresh network for a seed."""
    with global_stream(seed, "initial weights"):
        try:
            made = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        except (RuntimeError, MemoryError) as error:
            reason = first_line(error)
            raise ConfigError(f"the model cannot be made: {reason}") from error
    require(
        isinstance(made, nn.Module), "model", made, "a torch.nn.Module or a function making one"
    )
    return made


def model_settings(options: ModelOptions) -> dict[str, Any]:
    """The options that a model uses, as a trace has them."""
    values = {f.name: getattr(options, f.name) for f in fields(ModelOptions)}
    name = options.model
    if name in MODELS:
        return values
    maker = _maker(name)
    used = {n: value for n, value in values.items() if n in accepted(maker)}
    origin = {"model_from": import_path(maker)} if is_in_file(name) else {}
    return {**used, "model": short_name(name), **origin}


def model_defaults(name: str) -> dict[str, Any]:
    """The options for which a plug-in's function has a default of its own."""
    taken = {} if name in MODELS else accepted(_maker(name))
    known = {f.name for f in fields(ModelOptions)}
    return {n: d for n, d in taken.items() if n in known and d not in (None, Parameter.empty)}


def _maker(name: str) -> Any:
    return MODELS[name][1] if name in MODELS else plugin("model", name, MODELS)
