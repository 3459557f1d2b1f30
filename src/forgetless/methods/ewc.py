"""Elastic weight consolidation (Kirkpatrick et al. 2017), online (Schwarz et al. 2018)."""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from forgetless.linalg import inner
from forgetless.methods.base import FinishedTask, Method, View
from forgetless.methods.cost import Cost, TaskProbe, Work
from forgetless.support.validation import FRACTION, option, real

# The released code of the PCA-OGD paper divides the sum over the whole task by this, whatever the
# task's size: 10,000 samples weigh 9.8 times as much as in the mean.
_RELEASED_DIVISOR = 1024
_SCALE_FREE = 100.0  # the strength, in units of a task's scale
_TINY = 1e-30  # the scale of a task with nothing to protect


@final
@dataclass(frozen=True)
class Elastic:
    """A spring for every weight: its rest position and its stiffness.

    Arguments:
        fisher: the diagonal Fisher information of all tasks so far, (S, p).
        anchor: the weights after the latest task, (S, p).
    """

    fisher: Tensor
    anchor: Tensor


@final
@dataclass(frozen=True)
class EWC(Method[Elastic]):
    """Adds ½ strength · Σ_i F_i (θ_i − θ*_i)² to the loss, F the tasks' summed Fisher diagonals.

    F ← γ F + F_t after task t, and the anchor is the latest one: online EWC. With γ = 1 the Fishers
    add up, the recursive Laplace approximation (Huszár 2018). The Fisher is the empirical one, on
    the true labels.

    Fishers of two networks, or of one that is trained for longer, can differ a thousandfold. So by
    default every task has the strength 100 / (Σ_i F_i · mean_i θ*_i²): if all weights move by a
    tenth of their root mean square, the penalty rises by half a nat for each task. The gradient of
    this penalty is taken where the step ends, as `KronEWC` does, which is stable at any learning
    rate η: a weight at distance d follows (g + f d) / (1 + η f), with f its share of the penalty.

    Arguments:
        strength: weight of the penalty; None sets it by the scale of each task's Fisher.
        fisher: "mean" takes the mean of the squared gradients over a task's samples; "released"
            their sum divided by 1,024, as the PCA-OGD paper's code does.
        decay: γ, how much of the earlier tasks' Fisher is kept when a task is added.
    """

    name: ClassVar[str] = "ewc"
    label: ClassVar[str] = "EWC"
    summary: ClassVar[str] = "elastic weight consolidation: a spring on every weight"
    family: ClassVar[str] = "penalty"
    acts_on = "gradient"
    needs_model: ClassVar[bool] = False
    idle_before_first_task: ClassVar[bool] = True
    recordable: ClassVar[bool] = True
    separable: ClassVar[bool] = True
    zero_for_new_weights: ClassVar[bool] = True
    strength: float | None = option(
        None,
        "Weight of the penalty, in place of one by the scale of each task's Fisher information.",
        accepted=real(0),
        setting="ewc_strength",
        search=(1.0, 10.0, 30.0, 100.0, 300.0),
    )
    fisher: Literal["mean", "released"] = option(
        "mean",
        "Fisher information as the mean over samples, or their sum over 1,024 as in the paper's "
        "code.",
        choices=("mean", "released"),
        setting="ewc_fisher",
    )
    decay: float = option(
        1.0,
        "Share of the earlier tasks' Fisher information that is kept with each new one (γ of "
        "online EWC).",
        accepted=FRACTION,
        setting="ewc_decay",
    )

    @property
    def steadied_by(self) -> str:
        """Where lr · strength · F is above 2, every step overshoots the anchor by more."""
        return "a smaller strength" + ("" if self.strength is None else f" than {self.strength:g}")

    def advice(self, *, more: bool) -> str:
        """The strength, which has no number where it follows the Fisher."""
        if self.strength is None:
            return "set strength, in the thousands" if more else "set a small strength, below 100"
        return f"set strength {'above' if more else 'below'} {self.strength}"

    def cost(self, probe: TaskProbe) -> Cost | None:
        """Two numbers for each weight, and a pass over all samples."""
        size, both = probe.size, 2 * probe.vector
        # Squares of single samples' gradients take about twice as long as the pass itself.
        work = Work() if size is None else Work(3 * size)
        return Cost(both, both, 4 * probe.vector, work, Work(bytes=2 * both))

    def init(self, view: View) -> Elastic:
        """No spring before the first task."""
        return Elastic(torch.zeros_like(view.theta), torch.zeros_like(view.theta))

    def penalty(self, state: Elastic, theta: Tensor) -> Tensor:
        """½ strength · Σ_i F_i (θ_i − θ*_i)², (S,)."""
        # What is stored has its strength in it already if each task has its own.
        weight = 1.0 if self.strength is None else self.strength
        return 0.5 * weight * inner(state.fisher, (theta - state.anchor).square())

    def update(self, g: Tensor, state: Elastic, view: View) -> tuple[Tensor, Elastic]:
        """The gradient of loss plus penalty."""
        if self.strength is None:
            stiffness = state.fisher / (1 + view.lr * state.fisher)
            return g + stiffness * (view.theta - view.lr * g - state.anchor), state
        return g + self.strength * state.fisher * (view.theta - state.anchor), state

    def consolidate(self, state: Elastic, view: View, task: FinishedTask) -> Elastic:
        """Stiffen the springs by the task's Fisher information and re-anchor them."""
        divisor = task.size if self.fisher == "mean" else _RELEASED_DIVISOR
        fisher = task.squared_loss_gradients() / divisor
        if self.strength is None:
            fisher = fisher * (_SCALE_FREE / _scale(fisher, view).clamp_min(_TINY)).to(fisher)
        return Elastic(self.decay * state.fisher + fisher, view.theta.clone())


def _scale(fisher: Tensor, view: View) -> Tensor:
    """Σ_i F_i · mean_i θ_i², (S, 1) in float64, over all processes of a sharded model."""
    theta = view.theta
    sums = [fisher.sum(1, dtype=torch.float64), theta.square().sum(1, dtype=torch.float64)]
    counts = sums[0].new_full(sums[0].shape, theta.shape[1])
    found = torch.stack([*sums, counts])
    ranks = view.storage.ranks
    total, squares, count = (found if ranks is None else ranks.sum(found)).unbind()
    return (total * squares / count).unsqueeze(1)
