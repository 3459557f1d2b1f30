"""Learning without forgetting (Li and Hoiem 2017)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor
from torch.nn.functional import kl_div, pad

from forgetless.linalg import Growth
from forgetless.methods.base import FinishedTask, Method, View
from forgetless.methods.cost import Cost, TaskProbe, Work
from forgetless.support.validation import POSITIVE, option, real


@final
@dataclass(frozen=True)
class Teacher:
    """The network that the latest task ended with.

    Arguments:
        theta: its weights, (S, p).
        outputs: the outputs that competed in each earlier task, (S, K, C) of bool. Those that are
            part of a later task's are left out.
    """

    theta: Tensor
    outputs: Tensor

    def grown(self, growth: Growth, theta: Tensor) -> Self:
        """For a network with more weights: the former one's outputs depend on none of them."""
        return replace(self, theta=growth.padded(self.theta))


@final
@dataclass(frozen=True)
class LwF(Method[Teacher | None]):
    """Adds λ T² KL(softmax(z / T) ‖ softmax(f(x) / T)) on the present batch to the loss.

    z are the outputs of the network that the latest task ended with. Each softmax is over the
    outputs that competed in an earlier task, and the divergences of tasks with outputs of their
    own are added up.

    Arguments:
        strength: λ.
        temperature: T.
    """

    name: ClassVar[str] = "lwf"
    label: ClassVar[str] = "LwF"
    summary: ClassVar[str] = "learning without forgetting: the former outputs on the new samples"
    family: ClassVar[str] = "penalty"
    acts_on = "gradient"
    protected_by = "strength"
    needs_batch: ClassVar[bool] = True
    idle_before_first_task: ClassVar[bool] = True
    reaches_heads = True
    strength: float = option(
        1.0,
        "Weight of the distillation.",
        accepted=real(0),
        setting="lwf_strength",
        search=(0.1, 0.3, 1.0, 3.0, 10.0),
    )
    temperature: float = option(
        2.0, "Temperature of the distillation.", accepted=POSITIVE, setting="lwf_temperature"
    )

    def cost(self, probe: TaskProbe) -> Cost:
        """The weights, and the outputs of two networks on every batch."""
        return Cost(probe.vector, probe.vector, 2 * probe.vector, Work(1), Work(bytes=probe.vector))

    def init(self, view: View) -> None:
        """No former network."""

    def update(self, g: Tensor, state: Teacher | None, view: View) -> tuple[Tensor, Teacher | None]:
        """The gradient of loss plus distillation."""
        if state is None:
            return g, state
        with torch.no_grad():
            former = view.outputs(view.batch, state.theta)

        def divergence(outputs: Tensor, samples: Any) -> Tensor:
            return self._divergence(outputs, former, state.outputs)

        return g + self.strength * view.gradient(view.batch, divergence), state

    def _divergence(self, now: Tensor, former: Tensor, groups: Tensor) -> Tensor:
        """Of the outputs of both networks (S, n, C) within each group (S, K, C), (S, n)."""
        least, t = torch.finfo(now.dtype).min, self.temperature  # −∞ would make shares of 0 · ∞
        groups = pad(groups, (0, now.shape[-1] - groups.shape[-1]))
        total = now.new_zeros(now.shape[:2])
        for group in groups.unsqueeze(2).unbind(1):
            p, q = ((z / t).masked_fill(~group, least).log_softmax(-1) for z in (former, now))
            total = total + t**2 * kl_div(q, p, reduction="none", log_target=True).sum(-1)
        return total

    def consolidate(self, state: Teacher | None, view: View, task: FinishedTask) -> Teacher:
        """The present network becomes the former one."""
        few = task.draw(2)  # batch norm takes no single sample
        with torch.no_grad():
            new = view.competing(view.outputs(few), few)[:, :1]
        if state is None:
            return Teacher(view.theta.clone(), new)
        old = pad(state.outputs, (0, new.shape[-1] - state.outputs.shape[-1]))
        apart = (old & ~new).any(-1)[0]  # alike for all seeds
        return Teacher(view.theta.clone(), torch.cat([old[:, apart], new], 1))
