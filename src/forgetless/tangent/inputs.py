"""The inputs of a network's linear and convolutional layers, as matrices."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from forgetless.tangent.evaluation import Batch, call_with, eval_mode
from forgetless.tangent.factors import Patches
from forgetless.tangent.rules import Convolution, window_of

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def layer_inputs(
    module: nn.Module,
    values: Mapping[str, Tensor],
    batches: Sequence[Batch],
    *,
    names: Iterable[str] | None = None,
    present_mode: bool = False,
) -> dict[str, Tensor]:
    """The inputs that each weight multiplies: weight → A, (N, d), with outputs A Wᵀ + b.

    W is `weight.flatten(1)`, so d = `weight[0].numel()`. A has a row per sample and position:

    - `nn.Linear`: the vectors along the last dimension; tokens of a sequence are positions;
    - `nn.Conv1d`, `Conv2d`, `Conv3d`: the patches of the padded input that each output position
      sees, with channels first as in the weight. With g groups each group's patches are rows of
      their own, N = samples × positions × g.

    Rows of a layer that runs several times, of layers that share a weight, and of several batches
    are concatenated. Left out are weights of all other layers (embeddings, whose input is one-hot;
    norms; recurrent layers and `nn.MultiheadAttention`, which run without their parts; subclasses,
    which may compute something else) and of layers that did not run.

    Arguments:
        module: the network; neither it nor its buffers change.
        values: parameters and buffers, by name.
        batches: the samples; one forward pass each.
        names: the wanted weights; None for all.
        present_mode: whether modules keep their present train or eval modes; otherwise eval mode.
    """
    own = {id(p): name for name, p in module.named_parameters()}
    wanted = set(own.values()) if names is None else set(names)
    found: dict[str, list[Tensor]] = {name: [] for name in own.values() if name in wanted}
    handles = []
    for layer in module.modules():
        name = own.get(id(layer._parameters.get("weight")))
        if type(layer) in _LAYERS and name in found:
            hook = _noting(found[name])
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    buffers = {name: values.get(name, b).clone() for name, b in module.named_buffers()}
    try:
        with nullcontext() if present_mode else eval_mode(module), torch.no_grad():
            for batch in batches:
                call_with(module, {**values, **buffers}, batch.args, batch.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items() if parts}


def _noting(parts: list[Tensor]) -> Callable[..., None]:
    """A hook that adds a layer's inputs as a matrix."""

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parts.append(input_rows(layer, args[0] if args else kwargs["input"]))

    return note


def input_rows(layer: nn.Module, x: Tensor, every: int = 1) -> Tensor:
    """A layer's inputs as rows (N, d): vectors, or of a convolution (n · positions · g) patches.

    Arguments:
        layer: the layer.
        x: its inputs.
        every: of so many rows only one is made.
    """
    if not isinstance(layer, Convolution):
        return x.reshape(-1, x.shape[-1])[::every]
    space, window = len(layer.kernel_size), window_of(layer)
    if x.dim() == space + 1:  # a single sample
        x = x.unsqueeze(0)
    outputs = window.patches(x[:1]).shape[2 : 2 + space]
    if every > 1 and layer.groups == 1:
        rows = torch.arange(0, len(x) * prod(outputs), every, device=x.device)
        sample, *place = torch.unravel_index(rows, (len(x), *outputs))
        return window.patches(x).movedim(1, 1 + space)[(sample, *place)].flatten(1)
    patches = Patches(x.unsqueeze(1), layer.groups, window, prod(outputs)).dense()
    return patches.movedim(1, 2).flatten(0, 2)[::every]
