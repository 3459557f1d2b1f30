"""Running statistics that later tasks must not change: batch norm frozen after the first task."""

from typing import Any, final

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle


@final
class FrozenStatistics:
    """Keeps a model's layers with running statistics in eval mode, whatever mode the model is in.

    They then normalise by the stored mean and variance and no longer update them; their weights
    and biases are trained as before. Hooks set the mode, because `model.train()` is called again
    and again by a training loop.

    Arguments:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._layers: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []

    def freeze(self) -> None:
        """Freeze the layers that are not frozen yet."""
        if self._handles:
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
        self._handles = [layer.register_forward_pre_hook(_to_eval_mode) for layer in self._layers]
        for layer in self._layers:
            layer.eval()

    def restore(self) -> None:
        """Let the layers follow the model's mode again."""
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            layer.train(self._module.training)
        self._layers, self._handles = [], []


def _to_eval_mode(layer: nn.Module, args: Any) -> None:
    if layer.training:
        layer.eval()
