"""Experience replay with a reservoir (Chaudhry et al. 2019, "On tiny episodic memories")."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from forgetless.linalg import add_scaled
from forgetless.methods.base import View
from forgetless.methods.reservoir import ReplayBuffer, ReservoirRehearsal


@final
@dataclass(frozen=True)
class ER(ReservoirRehearsal):
    """Follows the mean loss on the present batch and a batch of stored samples together.

    g̃ = (n g + m r) / (n + m), with r the gradient on m stored samples beside the batch of n.

    Arguments:
        buffer: samples in the reservoir.
        batch_size: m.
    """

    name: ClassVar[str] = "er"
    label: ClassVar[str] = "ER"
    summary: ClassVar[str] = "experience replay: stored samples in every batch"

    def update(self, g: Tensor, state: ReplayBuffer, view: View) -> tuple[Tensor, ReplayBuffer]:
        """Mix in the gradient on stored samples."""
        if state.samples is not None:
            stored = self.drawn(state, view)
            share = len(stored) / (len(stored) + len(view.batch))
            g = add_scaled(g, share, view.gradient(stored) - g)
        return g, self.followed(state, view)
