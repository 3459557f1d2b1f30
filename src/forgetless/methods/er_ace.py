"""Experience replay with an asymmetric cross-entropy (Caccia et al. 2022)."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from forgetless.methods.base import View
from forgetless.methods.reservoir import ReplayBuffer, ReservoirRehearsal


@final
@dataclass(frozen=True)
class ERACE(ReservoirRehearsal):
    """Replay in which the present batch does not push down the outputs of classes it does not have.

    g̃ = ∇ L(batch; classes in the batch) + ∇ L(stored samples; all classes that compete), where the
    softmax of each cross-entropy L is over these classes. The gradient g of the usual loss, in
    which earlier classes compete with the batch, is replaced.

    Arguments:
        buffer: samples in the reservoir.
        batch_size: stored samples beside the present batch.
    """

    name: ClassVar[str] = "er-ace"
    label: ClassVar[str] = "ER-ACE"
    summary: ClassVar[str] = "replay in which new samples compete among their own classes only"

    def update(self, g: Tensor, state: ReplayBuffer, view: View) -> tuple[Tensor, ReplayBuffer]:
        """The gradient of both losses."""
        labels = view.labels(view.batch)

        def among_present(outputs: Tensor, samples: object) -> Tensor:
            absent = torch.ones_like(outputs[:, 0], dtype=torch.bool)
            absent.scatter_(1, labels, torch.zeros_like(labels, dtype=torch.bool))
            others = absent.unsqueeze(1) | ~view.competing(outputs, view.batch)
            likelihoods = outputs.masked_fill(others, -torch.inf).log_softmax(-1)
            return -likelihoods.gather(-1, labels.unsqueeze(-1)).squeeze(-1)

        step = view.gradient(view.batch, among_present)
        if state.samples is not None:
            step = step + view.gradient(self.drawn(state, view))
        return step, self.followed(state, view)
