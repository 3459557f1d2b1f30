"""The loss on remembered samples, for methods that follow it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from forgetless.errors import ConfigError, require
from forgetless.guard.outputs import Output, batch_size, check_target, likelihood, logits_of


def usual_loss(outputs: Any, target: Tensor | None) -> Tensor:
    """Each sample's loss, (n,): cross-entropy for labels and tokens, squared error for numbers."""
    logits = logits_of(outputs)
    if target is None:
        raise ConfigError("this method follows a loss: batches need a target, or give loss=")
    if target.is_floating_point() and logits.numel() == target.numel():
        each = mse_loss(logits.reshape(target.shape), target, reduction="none")
        return each.flatten(1).mean(1) if each.dim() > 1 else each
    if not target.is_floating_point() and logits.dim() == 3 and target.dim() == 2:
        return -likelihood(outputs, target)
    if not target.is_floating_point() and logits.dim() == 2 and target.dim() == 1:
        return cross_entropy(logits, target.long(), reduction="none")
    raise ConfigError(
        f"no usual loss for outputs {tuple(logits.shape)} and target {tuple(target.shape)} of "
        f"{target.dtype}: give loss=, a function of outputs and target"
    )


def check_loss(
    loss: Output | None, outputs: Any, target: Tensor | None, targets: Tensor | None
) -> None:
    """Refuse samples that have no loss.

    Arguments:
        outputs, target: of a few samples.
        targets: of all samples.
    """
    mean_loss(loss, outputs, target)
    if loss is None and targets is not None and not targets.is_floating_point():
        name = "class" if targets.dim() == 1 else "likelihood"
        check_target(name, outputs, targets)


def sample_losses(loss: Output | None, outputs: Any, target: Tensor | None) -> Tensor:
    """Each sample's loss, (n,); with a user's loss, from a batch of one sample each."""
    if loss is None:
        return usual_loss(outputs, target)
    count = batch_size(outputs, target)
    if count is None:
        raise ConfigError("loss= needs batches with a target here, to tell samples apart")
    return torch.stack([mean_loss(loss, *_one(outputs, target, i)) for i in range(count)])


def mean_loss(loss: Output | None, outputs: Any, target: Tensor | None) -> Tensor:
    """The loss of a batch, a scalar."""
    if loss is None:
        return usual_loss(outputs, target).mean()
    value = loss(outputs) if target is None else loss(outputs, target)
    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    single = isinstance(value, Tensor) and value.numel() == 1
    require(single, "what loss= returns", shape, "one number")
    return value.reshape(())


def _one(outputs: Any, target: Tensor | None, i: int) -> tuple[Any, Tensor | None]:
    """What the model would have returned for one sample alone."""

    def cut(value: Any) -> Any:
        return value[i : i + 1] if isinstance(value, Tensor) and value.dim() else value

    if isinstance(outputs, Mapping):
        one: Any = type(outputs)(**{key: cut(value) for key, value in outputs.items()})
    elif isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        one = type(outputs)(*map(cut, outputs))
    elif isinstance(outputs, tuple | list):
        one = type(outputs)(map(cut, outputs))
    elif isinstance(outputs, Tensor):
        one = cut(outputs)
    else:
        raise ConfigError(
            f"the model returns a {type(outputs).__name__}, which cannot be taken apart sample by "
            "sample; let it return a tensor, a tuple or a dict"
        )
    return one, None if target is None else target[i : i + 1]
