"""The loss on remembered samples, for methods that follow it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from forgetless.guard.batches.outputs import (
    OF_SEQUENCES,
    OUTPUTS,
    SEQUENCES,
    Named,
    Output,
    batch_size,
    check_target,
    logits_of,
)
from forgetless.support.errors import ConfigError, require


@final
@dataclass(frozen=True)
class Loss:
    """From a model's outputs and the target to a number.

    Arguments:
        function: a user's, of a batch; None for the usual one.
        output: what is protected, which tells how labels of a sequence lie beside its logits.
    """

    function: Output | None
    output: Named | Output | None

    def mean(self, outputs: Any, target: Tensor | None) -> Tensor:
        """The loss of a batch, a scalar."""
        if self.function is None:
            return self._usual(outputs, target).mean()
        value = self.function(outputs) if target is None else self.function(outputs, target)
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        single = isinstance(value, Tensor) and value.numel() == 1
        require(single, "what loss= returns", shape, "one number")
        return value.reshape(())

    def of_each(self, outputs: Any, target: Tensor | None) -> Tensor:
        """Each sample's loss, (n,); with a user's loss, from a batch of one sample each."""
        if self.function is None:
            return self._usual(outputs, target)
        count = batch_size(outputs, target)
        if count is None:
            raise ConfigError("loss= needs batches with a target here, to tell samples apart")
        return torch.stack([self.mean(*_one(outputs, target, i)) for i in range(count)])

    def check(self, outputs: Any, target: Tensor | None, targets: Tensor | None) -> None:
        """Refuse samples that have no loss.

        Arguments:
            outputs, target: of a few samples.
            targets: of all samples.
        """
        if self.function is None and targets is not None and not targets.is_floating_point():
            kind = "class" if targets.dim() == 1 else self.output
            # First, where they are of the right shape: a label too large is no index.
            if logits_of(outputs).dim() == targets.dim() + 1 and isinstance(kind, str):
                check_target(kind, outputs, targets)
        self.mean(outputs, target)

    def _usual(self, outputs: Any, target: Tensor | None) -> Tensor:
        """(n,): cross-entropy for labels and tokens, squared error for numbers."""
        logits = logits_of(outputs)
        if target is None:
            raise ConfigError("this method follows a loss: batches need a target, or give loss=")
        if target.is_floating_point() and logits.numel() == target.numel():
            each = mse_loss(logits.reshape(target.shape), target, reduction="none")
            return each.flatten(1).mean(1) if each.dim() > 1 else each
        if not target.is_floating_point() and logits.dim() == 3 and target.dim() == 2:
            return -self._sequences(outputs, target)
        if not target.is_floating_point() and logits.dim() == 2 and target.dim() == 1:
            return cross_entropy(logits, target.long(), reduction="none")
        raise ConfigError(
            f"no usual loss for outputs {tuple(logits.shape)} and target {tuple(target.shape)} of "
            f"{target.dtype}: give loss=, a function of outputs and target"
        )

    def _sequences(self, outputs: Any, target: Tensor) -> Tensor:
        """The mean log-likelihood of each sequence, (n,)."""
        if self.output not in OF_SEQUENCES:
            raise ConfigError(
                f"the loss of outputs {tuple(logits_of(outputs).shape)} with target "
                f"{tuple(target.shape)} may be one of several: give loss=, or output={SEQUENCES}"
            )
        found: Tensor = OUTPUTS[str(self.output)](outputs, target)
        return found


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
