"""Running statistics that later tasks must not change: batch norm frozen after the first task."""

from typing import final

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def has_moving_statistics(module: nn.Module) -> bool:
    """Whether training updates running statistics."""
    return any(
        isinstance(layer, _NormBase) and layer.running_mean is not None and layer.training
        for layer in module.modules()
    )


@final
class FrozenStatistics:
    """Keeps a model's layers with running statistics in eval mode, whatever mode the model is in.

    They then normalise by the stored mean and variance and no longer update them; their weights
    and biases are trained as before.

    Arguments:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._layers: list[nn.Module] = []

    def freeze(self) -> None:
        """Freeze the layers, unless they are frozen already."""
        if self._layers:
            return
        # A layer in eval mode inside a model in training mode was frozen by the user.
        in_use = self._module.training
        self._layers = [
            layer
            for layer in self._module.modules()
            if isinstance(layer, _NormBase)
            and layer.running_mean is not None
            and (layer.training or not in_use)
        ]
        for layer in self._layers:
            layer.eval()
            # A training loop calls `model.train()` again and again. A forward hook could set the
            # mode as well, but compiled code does not notice new hooks.
            layer.train = _ConstantMode(layer)  # type: ignore[method-assign]

    def restore(self) -> None:
        """Let the layers follow the model's mode again."""
        for layer in self._layers:
            del layer.train
            layer.train(self._module.training)
        self._layers = []


@final
class _ConstantMode:
    """`train` of a layer that stays in its mode; a class, so that the model can be pickled."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, mode: bool = True) -> nn.Module:
        return self.layer
