"""Elastic weight consolidation in a Kronecker eigenbasis, as strong as the old tasks need."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from forgetless.linalg import Growth
from forgetless.methods.base import FinishedTask, Method, View
from forgetless.methods.cost import Cost, TaskProbe, cost_of_eigenbasis
from forgetless.methods.kfac_laplace import Posterior
from forgetless.subspace.eigenbasis import Axis, Eigenbasis, as_leading
from forgetless.support.validation import FRACTION, POSITIVE, option, real, whole

# A look at the stored tasks raises the strength at most, and lowers it at most, by these factors.
_UP, _DOWN = 4.0, 1.25
_MOST = 3000.0  # times the least strength


@final
@dataclass(frozen=True)
class Springs:
    """Springs on the coordinates of every layer's eigenbasis.

    Arguments:
        posterior: their rest position and stiffness.
        strength: λ, (S,).
    """

    posterior: Posterior
    strength: Tensor

    def grown(self, growth: Growth, theta: Tensor) -> Self:
        """For a network with more weights, of which no task has used the new ones."""
        return replace(self, posterior=self.posterior.grown(growth, theta))


@final
@dataclass(frozen=True)
class KronEWC(Method[Springs]):
    """Adds ½ λ K tr(G (W − W*) A (W − W*)ᵀ) of every layer to the loss after K tasks; λ adapts.

    G ⊗ A is K-FAC's Fisher information of a layer, as in `KFACLaplace`, with changes that
    make one strength fit many networks:

    - Labels are drawn from 0.9 p + 0.1 / C in place of p. A network that is certain of its answers
      has hardly any Fisher information; this is what other labels for its inputs would move, in
      nats per label.
    - G ← (1 − ρ) G + ρ tr(G) / r · I, since gradients change with the weights: inputs matter for
      all outputs of a layer. Without it, changes of several layers that are harmless alone add up.
    - λ follows what is kept. Every few steps it is told how far the mean loss h_k of each task k is
      above that at the anchor, on 16 samples (in a guard, those of its drift check), and

          λ ← clip(λ · clip(max_k h_k / tolerance, 1 / 1.25, 4), strength, 3000 strength)

      In a guard without such samples, λ = strength.

    The penalty's gradient is taken where the step ends, not where it starts. With learning rate η a
    step of gradient descent is then the minimum of penalty and ‖θ − (θ_t − η g)‖² / 2η: in a
    coordinate of energy E at distance d it follows (g + λ E d) / (1 + η λ E), which is stable for
    any λ.

    Arguments:
        strength: the least weight of the penalty, in nats of new loss for one of old.
        tolerance: rise of an earlier task's loss above which the penalty gets stronger.
        samples: samples of each task whose gradients are used.
        shrinkage: ρ; 0 is K-FAC's product, 1 holds inputs for all outputs of a layer alike.
    """

    name: ClassVar[str] = "kron-ewc"
    label: ClassVar[str] = "KronEWC"
    summary: ClassVar[str] = "springs in a Kronecker eigenbasis, as strong as old tasks need"
    family: ClassVar[str] = "penalty"
    acts_on = "gradient"
    needs_model: ClassVar[bool] = False
    idle_before_first_task: ClassVar[bool] = True
    over_ranks: ClassVar[bool] = True
    adapts: ClassVar[bool] = True
    state_types: ClassVar[tuple[type, ...]] = (Posterior, Eigenbasis, Axis)
    strength: float = option(
        3.0,
        "The least weight of the penalty.",
        accepted=real(0),
        setting="kron_strength",
        search=(0.3, 3.0, 30.0),
    )
    tolerance: float = option(
        0.2,
        "Rise of an earlier task's loss above which the penalty gets stronger.",
        accepted=POSITIVE,
    )
    samples: int = option(3000, "Samples of each task whose gradients are used.", accepted=whole(1))
    shrinkage: float = option(
        0.5,
        "How far each layer's moments of gradients are shrunk to the identity: 0 to 1.",
        accepted=FRACTION,
    )

    def advice(self, *, more: bool) -> str:
        """The strength and the tolerance, which both hold."""
        if more:
            return f"set tolerance below {self.tolerance:g} or strength above {self.strength:g}"
        return f"set tolerance above {self.tolerance:g} or strength below {self.strength:g}"

    def cost(self, probe: TaskProbe) -> Cost:
        """The eigenbasis, the anchor and λ."""
        found, number = cost_of_eigenbasis(probe, self.samples, vectors=1), torch.float64.itemsize
        return replace(found, least=found.least + number, most=found.most + number)

    def init(self, view: View) -> Springs:
        """No penalty before the first task."""
        nothing = Posterior(Eigenbasis.empty(), 0, torch.zeros_like(view.theta))
        return Springs(nothing, self._least(view.theta))

    def _least(self, theta: Tensor) -> Tensor:
        """The least strength for each of S seeds."""
        return theta.new_full(theta.shape[:1], self.strength, dtype=torch.float64)

    def update(self, g: Tensor, state: Springs, view: View) -> tuple[Tensor, Springs]:
        """The gradient of the loss before the step, plus that of the penalty after it."""
        known = state.posterior
        if not known.tasks:
            return g, state
        weight, lr = (state.strength * known.tasks).to(g), view.lr

        def stiffness(energies: Tensor) -> Tensor:
            stiff = as_leading(weight, energies) * energies
            return stiff / (1 + lr * stiff)

        moved = view.theta - lr * g - known.anchor
        return g + known.basis.product(moved, view.layout, stiffness, view.storage.ranks), state

    def adapted(self, state: Springs, harm: Callable[[Tensor], Tensor]) -> Springs:
        """A stronger penalty where a task gets worse than tolerated, else a weaker one."""
        worst = harm(state.posterior.anchor).nan_to_num(torch.inf).amax(1).to(state.strength)
        strength = state.strength * (worst / self.tolerance).clamp(1 / _DOWN, _UP)
        return replace(state, strength=strength.clamp(self.strength, _MOST * self.strength))

    def metrics(self, state: Springs) -> dict[str, float]:
        """The strength that the penalty now has."""
        return {"strength": float(state.strength.mean())}

    def consolidate(self, state: Springs, view: View, task: FinishedTask) -> Springs:
        """Add the task's moments, move the anchor, and begin with the least strength."""
        moments = view.moments(task.draw(self.samples), "mixed").shrunk(self.shrinkage)
        theta, known = view.theta.clone(), state.posterior
        basis = known.basis.averaged(moments, known.tasks, theta, view.storage.ranks)
        return Springs(Posterior(basis, known.tasks + 1, theta), self._least(theta))
