"""Four methods of one's own: OWM, DER++, LwF and SI, each as its paper has it.

They run wherever a built-in method does:

    forgetless compare rotated-digits --methods sgd,examples/own_methods.py:OWM

or, in Python, `fit(tasks, OWM())` and `Guard(model, optimizer, OWM())`. docs/methods.md explains
the interface.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from forgetless import Method, View
from forgetless.methods import FinishedTask, choose, option


@dataclass(frozen=True)
class OWM(Method[dict[str, Tensor]]):
    """Orthogonal weights modification (Zeng et al. 2019): G ← G P for each layer's weight.

    With the rows of X a layer's inputs on all earlier tasks, P = α (Xᵀ X + α I)⁻¹. It is stored
    alone: with more inputs x it becomes P − P xᵀ (x P xᵀ + α I)⁻¹ x P.

    Arguments:
        alpha: α. Directions in which the inputs' squared length is far below it stay free.
        samples: samples of each task whose inputs are looked at.
    """

    name = "owm"
    label = "OWM"
    summary = "orthogonal weights modification: steps along few of the inputs of each layer"
    acts_on = "update"
    needs_model = False
    idle_before_first_task = True
    recordable = True
    alpha: float = option(1.0, "Squared length of inputs that are hardly protected.")
    samples: int = option(300, "Samples of each task whose layer inputs are used.")

    def init(self, view: View) -> dict[str, Tensor]:
        return {}

    def update(
        self, g: Tensor, state: dict[str, Tensor], view: View
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if not state:
            return g, state
        parts = view.layout.split(g)
        for name, p in state.items():
            parts[name] = (parts[name].flatten(2) @ p).view_as(parts[name])
        return view.layout.join(parts), state

    def consolidate(
        self, state: dict[str, Tensor], view: View, task: FinishedTask
    ) -> dict[str, Tensor]:
        inputs = view.layer_inputs(task.draw(self.samples))
        return state | {name: self._without(state.get(name), x) for name, x in inputs.items()}

    def _without(self, p: Tensor | None, x: Tensor) -> Tensor:
        """P (S, d, d) with more inputs, (S, N, d)."""
        if p is None:
            p = torch.eye(x.shape[2]).to(x).expand(len(x), -1, -1)
        inside = x @ p @ x.mT + self.alpha * torch.eye(x.shape[1]).to(x)
        return p - p @ x.mT @ torch.linalg.solve(inside, x @ p)


@dataclass(frozen=True)
class Buffer:
    """DER++'s reservoir.

    Arguments:
        samples: with the outputs at the time they were seen attached as `logits`.
        seen: how many samples came by.
    """

    samples: Any = None
    seen: int = 0


@dataclass(frozen=True)
class DERPP(Method[Buffer]):
    """Dark experience replay ++ (Buzzega et al. 2020).

    Adds α · mean (f(x) − z)² on one batch of a reservoir and β times the loss on another, z the
    outputs when a sample was seen.
    """

    name = "der++"
    label = "DER++"
    summary = "dark experience replay: a reservoir of samples with their former outputs"
    acts_on = "gradient"
    needs_batch = True
    reaches_heads = True
    memory: int = option(200, "Samples in the reservoir.")
    batch_size: int = option(32, "Stored samples in a step.", setting="der_batch")
    alpha: float = option(0.1, "Weight of the former outputs.", setting="der_alpha")
    beta: float = option(0.5, "Weight of the loss on stored samples.", setting="der_beta")

    def init(self, view: View) -> Buffer:
        return Buffer()

    def update(self, g: Tensor, state: Buffer, view: View) -> tuple[Tensor, Buffer]:
        if state.samples is not None:
            first = choose(view, state.samples, self.batch_size)
            second = choose(view, state.samples, self.batch_size)
            g = g + self.alpha * view.gradient(first, _squared_change)
            g = g + self.beta * view.gradient(second)
        return g, self._reservoir(state, view)

    def consolidate(self, state: Buffer, view: View, task: FinishedTask) -> Buffer:
        return state

    def _reservoir(self, state: Buffer, view: View) -> Buffer:
        """With the present batch: every sample that came by is in it with equal chance."""
        with torch.no_grad():
            new = view.batch.attach(logits=view.outputs(view.batch))
        held = 0 if state.samples is None else len(state.samples)
        numbers = view.random(len(new)).tolist()  # (S, n)
        kept = [list(range(held)) for _ in numbers]
        for slots, of_seed in zip(kept, numbers, strict=True):
            for i, number in enumerate(of_seed):
                place = int(number * (state.seen + i + 1))
                if len(slots) < self.memory:
                    slots.append(held + i)
                elif place < self.memory:
                    slots[place] = held + i
        both = new if state.samples is None else state.samples + new
        index = torch.tensor(kept, device=view.theta.device)
        return Buffer(both.select(index), state.seen + len(new))


def _squared_change(outputs: Tensor, samples: Any) -> Tensor:
    return (outputs - samples.extra["logits"]).square().flatten(2).mean(2)


@dataclass(frozen=True)
class LwF(Method[Any]):
    """Learning without forgetting (Li and Hoiem 2017).

    Adds λ T² KL(softmax(z/T) ‖ softmax(f(x)/T)) on the present batch, z the outputs at the weights
    that the latest task ended with.
    """

    name = "lwf"
    label = "LwF"
    summary = "learning without forgetting: the former network's outputs on the new data"
    acts_on = "gradient"
    needs_batch = True
    idle_before_first_task = True
    reaches_heads = True
    strength: float = option(1.0, "Weight of the distillation.", setting="lwf_strength")
    temperature: float = option(2.0, "Temperature of the outputs.", setting="lwf_temperature")

    def init(self, view: View) -> None:
        return None

    def update(self, g: Tensor, state: Tensor | None, view: View) -> tuple[Tensor, Any]:
        if state is None:
            return g, state
        with torch.no_grad():
            former = view.outputs(view.batch, state)
        added = view.gradient(view.batch.attach(former=former), self._divergence)
        return g + self.strength * added, state

    def consolidate(self, state: Tensor | None, view: View, task: FinishedTask) -> Tensor:
        return view.theta.clone()

    def _divergence(self, outputs: Tensor, samples: Any) -> Tensor:
        t = self.temperature
        now, former = (log_softmax(z / t, -1) for z in (outputs, samples.extra["former"]))
        return t**2 * kl_div(now, former, reduction="none", log_target=True).sum(-1)


@dataclass(frozen=True)
class Path:
    """SI's state; every tensor is (S, p).

    Arguments:
        importance: Ω, of all finished tasks.
        anchor: the weights at the end of the latest task.
        integral: −∫ g dθ over the present task.
        theta: the weights at the latest step.
        g: the loss gradient there.
    """

    importance: Tensor
    anchor: Tensor
    integral: Tensor
    theta: Tensor
    g: Tensor

    def moved_to(self, theta: Tensor, g: Tensor) -> "Path":
        """After the step that led to theta, where the gradient is g."""
        integral = self.integral - self.g * (theta - self.theta)
        return Path(self.importance, self.anchor, integral, theta.clone(), g.clone())


@dataclass(frozen=True)
class SI(Method[Path]):
    """Synaptic intelligence (Zenke, Poole and Ganguli 2017): adds c Σ_i Ω_i (θ_i − θ*_i)².

    Ω sums over tasks max(0, −∫ g dθ) / ((θ − θ*)² + ξ), a weight's share in what was learned.
    """

    name = "si"
    label = "SI"
    summary = "synaptic intelligence: a spring for every weight, by its part in learning"
    acts_on = "gradient"
    needs_model = False
    separable = True
    strength: float = option(1.0, "Weight of the penalty.", setting="si_strength")
    damping: float = option(1e-3, "ξ, which keeps Ω finite.", setting="si_damping")

    def init(self, view: View) -> Path:
        zero, theta = torch.zeros_like(view.theta), view.theta.clone()
        return Path(zero, theta, zero, theta, zero)

    def update(self, g: Tensor, state: Path, view: View) -> tuple[Tensor, Path]:
        pull = 2 * self.strength * state.importance * (view.theta - state.anchor)
        return g + pull, state.moved_to(view.theta, g)

    def consolidate(self, state: Path, view: View, task: FinishedTask) -> Path:
        end = state.moved_to(view.theta, torch.zeros_like(view.theta))
        moved = (view.theta - state.anchor).square() + self.damping
        importance = state.importance + end.integral.clamp_min(0) / moved
        return Path(importance, end.theta, torch.zeros_like(end.integral), end.theta, end.g)
