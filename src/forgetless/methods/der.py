"""Dark experience replay, and the same with labels (Buzzega et al. 2020)."""

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from forgetless.methods.base import View
from forgetless.methods.reservoir import ReplayBuffer, ReservoirRehearsal
from forgetless.support.validation import option, real


@dataclass(frozen=True)
class DarkReplay(ReservoirRehearsal):
    """Replay of samples with the outputs z that the network had for them when they came by."""

    alpha: float = option(
        0.5,
        "Weight of the change of outputs.",
        accepted=real(0),
        setting="der_alpha",
        search=(0.1, 0.2, 0.5, 1.0),
    )

    def alike(self, stored: Any, view: View) -> tuple[Any, Any]:
        """With the outputs attached, and once a head has grown which of them a sample had."""
        with torch.no_grad():
            outputs = view.outputs(view.batch)
        new = view.batch.attach(outputs=outputs)
        if stored is None:
            return stored, new
        then = stored.extra["outputs"]
        more = outputs.shape[-1] - then.shape[-1]
        if more:
            known = stored.extra.get("known", torch.ones_like(then, dtype=torch.bool))
            stored = stored.attach(outputs=pad(then, (0, more)), known=pad(known, (0, more)))
        if "known" in stored.extra:
            new = new.attach(known=torch.ones_like(outputs, dtype=torch.bool))
        return stored, new

    def pull(self, state: ReplayBuffer, view: View) -> Tensor:
        """The gradient of the mean of (f(x) − z)² over a batch of stored samples."""
        gradient: Tensor = view.gradient(self.drawn(state, view), squared_change)
        return gradient


def squared_change(outputs: Tensor, samples: Any) -> Tensor:
    """(f(x) − z)², mean over the outputs that each sample had then: (S, n, C) → (S, n)."""
    then: Tensor = samples.extra["outputs"]
    squares = (outputs[..., : then.shape[-1]] - then).square()
    known = samples.extra.get("known")
    return squares.mean(-1) if known is None else (squares * known).sum(-1) / known.sum(-1)


@final
@dataclass(frozen=True)
class DER(DarkReplay):
    """Adds α · mean (f(x) − z)² on a batch of stored samples to the loss.

    z are the outputs, all of them, that the network had for x when it came by in training.

    Arguments:
        buffer: samples in the reservoir.
        batch_size: stored samples in a step.
        alpha: α.
    """

    name: ClassVar[str] = "der"
    label: ClassVar[str] = "DER"
    summary: ClassVar[str] = "dark experience replay: stored samples keep their former outputs"

    def update(self, g: Tensor, state: ReplayBuffer, view: View) -> tuple[Tensor, ReplayBuffer]:
        """The gradient of loss plus penalty."""
        if state.samples is not None:
            g = g + self.alpha * self.pull(state, view)
        return g, self.followed(state, view)


@final
@dataclass(frozen=True)
class DERPP(DarkReplay):
    """Adds α · mean (f(x) − z)² on a batch of stored samples, and β times the loss on another.

    z are the outputs, all of them, that the network had for x when it came by in training.

    Arguments:
        buffer: samples in the reservoir.
        batch_size: stored samples in each of the two batches of a step.
        alpha: α.
        beta: β.
    """

    name: ClassVar[str] = "der++"
    label: ClassVar[str] = "DER++"
    summary: ClassVar[str] = "DER that follows the stored samples' labels, too"
    beta: float = option(
        0.5, "Weight of the loss on stored samples.", accepted=real(0), setting="der_beta"
    )

    def update(self, g: Tensor, state: ReplayBuffer, view: View) -> tuple[Tensor, ReplayBuffer]:
        """The gradient of loss, penalty and loss on stored samples."""
        if state.samples is not None:
            g = g + self.alpha * self.pull(state, view)
            g = g + self.beta * view.gradient(self.drawn(state, view))
        return g, self.followed(state, view)
