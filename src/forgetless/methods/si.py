"""Synaptic intelligence (Zenke, Poole and Ganguli 2017)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from forgetless.linalg import Growth, inner
from forgetless.methods.base import FinishedTask, Method, View
from forgetless.methods.cost import Cost, TaskProbe, Work
from forgetless.support.validation import POSITIVE, option, real


@final
@dataclass(frozen=True)
class Path:
    """The way that the weights have come; every tensor is (S, p).

    Arguments:
        importance: Ω of all finished tasks.
        anchor: the weights at the end of the latest task, before the first one the initial ones.
        integral: ω = −Σ g · Δθ over the steps of the present task.
        theta: the weights at the latest step.
        g: the gradient of the loss there.
    """

    importance: Tensor
    anchor: Tensor
    integral: Tensor
    theta: Tensor
    g: Tensor

    def moved_to(self, theta: Tensor, g: Tensor) -> Self:
        """After the step that led to theta, where the gradient is g."""
        integral = self.integral - self.g * (theta - self.theta)
        return replace(self, integral=integral, theta=theta, g=g)

    def grown(self, growth: Growth, theta: Tensor) -> Self:
        """For a network with more weights, whose way begins here."""
        importance, integral, g = map(growth.padded, (self.importance, self.integral, self.g))
        anchor, before = growth.spread(self.anchor, theta), growth.spread(self.theta, theta)
        return type(self)(importance, anchor, integral, before, g)


@final
@dataclass(frozen=True)
class SI(Method[Path]):
    """Adds c Σ_i Ω_i (θ_i − θ*_i)² to the loss, θ* the weights after the latest task.

    Ω_i sums max(0, ω_i) / ((Δθ_i)² + ξ) over the tasks: ω_i = −Σ g_i Δθ_i is how far a weight's
    steps lowered the loss while it moved by Δθ_i in all. g is the gradient of the loss alone.

    Arguments:
        strength: c.
        damping: ξ, which keeps Ω finite where a weight has hardly moved.
    """

    name: ClassVar[str] = "si"
    label: ClassVar[str] = "SI"
    summary: ClassVar[str] = "synaptic intelligence: springs by each weight's part in learning"
    family: ClassVar[str] = "penalty"
    acts_on = "gradient"
    protected_by = "strength"
    needs_model: ClassVar[bool] = False
    separable: ClassVar[bool] = True
    strength: float = option(
        1.0,
        "Weight of the penalty.",
        accepted=real(0),
        setting="si_strength",
        search=(0.1, 1.0, 10.0, 100.0),
    )
    damping: float = option(
        0.1, "Square of a weight's way that counts little.", accepted=POSITIVE, setting="si_damping"
    )

    @property
    def steadied_by(self) -> str:
        """Where lr · strength · Ω is above 1, every step overshoots the anchor by more."""
        return f"a smaller strength than {self.strength:g}"

    def cost(self, probe: TaskProbe) -> Cost:
        """Five numbers for each weight, of which every step writes three."""
        size = 5 * probe.vector
        return Cost(size, size, size + 3 * probe.vector, Work(bytes=size), Work(bytes=2 * size))

    def init(self, view: View) -> Path:
        """At the initial weights, where nothing is important."""
        zero, theta = torch.zeros_like(view.theta), view.theta.clone()
        return Path(zero, theta, zero, theta, zero)

    def penalty(self, state: Path, theta: Tensor) -> Tensor:
        """c Σ_i Ω_i (θ_i − θ*_i)², (S,)."""
        return self.strength * inner(state.importance, (theta - state.anchor).square())

    def update(self, g: Tensor, state: Path, view: View) -> tuple[Tensor, Path]:
        """The gradient of loss plus penalty."""
        theta = view.theta
        pull = 2 * self.strength * state.importance * (theta - state.anchor)
        return g + pull, state.moved_to(theta, g)

    def consolidate(self, state: Path, view: View, task: FinishedTask) -> Path:
        """Weigh every weight by its part in learning the task, and anchor it where it is."""
        zero = torch.zeros_like(view.theta)
        end = state.moved_to(view.theta, zero)
        moved = (end.theta - end.anchor).square() + self.damping
        importance = end.importance + end.integral.clamp_min(0) / moved
        return Path(importance, end.theta, zero, end.theta, zero)
