"""The online Kronecker-factored Laplace approximation (Ritter, Botev and Barber 2018)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from forgetless.linalg import Growth
from forgetless.methods.base import FinishedTask, Method, View
from forgetless.methods.cost import Cost, TaskProbe, cost_of_eigenbasis
from forgetless.subspace.eigenbasis import Axis, Eigenbasis
from forgetless.support.validation import option, real, whole


@final
@dataclass(frozen=True)
class Posterior:
    """A Gaussian over the weights.

    Arguments:
        basis: the eigenvectors and eigenvalues of the Fisher information, a mean over the tasks.
        tasks: how many there are.
        anchor: the mean, the weights after the latest task, (S, p).
    """

    basis: Eigenbasis
    tasks: int
    anchor: Tensor

    def grown(self, growth: Growth, theta: Tensor) -> Self:
        """For a network with more weights, of which no task has used the new ones."""
        return replace(self, basis=self.basis.grown(growth), anchor=growth.padded(self.anchor))


@final
@dataclass(frozen=True)
class KFACLaplace(Method[Posterior]):
    """Adds ½ strength · tr(G (W − W*) A (W − W*)ᵀ) of every layer to the loss, summed over tasks.

    K-FAC's moments G ⊗ A of the gradients of a drawn label's log-likelihood are the layer's Fisher
    information. Over K tasks the sum of the products is taken for K times the product of the mean
    factors, so that the memory does not grow, and W* is the latest weights. A bias is a column of
    W; parameters without such factors have their diagonal, as in EWC.

    Arguments:
        strength: weight of the penalty; 1 is Bayes' rule for tasks of equal size.
        samples: samples of each task whose gradients are used.
    """

    name: ClassVar[str] = "kfac-laplace"
    label: ClassVar[str] = "K-FAC Laplace"
    summary: ClassVar[str] = "a quadratic penalty by the Kronecker-factored Fisher information"
    family: ClassVar[str] = "penalty"
    acts_on = "gradient"
    needs_model: ClassVar[bool] = False
    idle_before_first_task: ClassVar[bool] = True
    recordable: ClassVar[bool] = True
    state_types: ClassVar[tuple[type, ...]] = (Eigenbasis, Axis)
    strength: float = option(
        1.0,
        "Weight of the penalty.",
        accepted=real(0),
        setting="laplace_strength",
        search=(0.1, 1.0, 10.0),
    )
    samples: int = option(3000, "Samples of each task whose gradients are used.", accepted=whole(1))

    @property
    def steadied_by(self) -> str:
        """Where lr · strength · F is above 2, every step overshoots the anchor by more."""
        return f"a smaller strength than {self.strength:g}"

    def cost(self, probe: TaskProbe) -> Cost:
        """The eigenbasis and the anchor."""
        return cost_of_eigenbasis(probe, self.samples, vectors=1)

    def init(self, view: View) -> Posterior:
        """No penalty before the first task."""
        return Posterior(Eigenbasis.empty(), 0, torch.zeros_like(view.theta))

    def update(self, g: Tensor, state: Posterior, view: View) -> tuple[Tensor, Posterior]:
        """The gradient of loss plus penalty: g + strength · K · G (W − W*) A."""
        if not state.tasks:
            return g, state
        pull = state.basis.product(view.theta - state.anchor, view.layout)
        return g + self.strength * state.tasks * pull, state

    def consolidate(self, state: Posterior, view: View, task: FinishedTask) -> Posterior:
        """Add the task's Fisher information, and move the anchor."""
        moments = view.moments(task.draw(self.samples), "fisher")
        basis = state.basis.averaged(moments, state.tasks, view.theta)
        return Posterior(basis, state.tasks + 1, view.theta.clone())
