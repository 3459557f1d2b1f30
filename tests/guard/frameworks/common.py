"""What the tests of all integrations share."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forgetless import Guard, Method


@dataclass(frozen=True)
class Looking(Method):
    """Notes the batch of each step, and calls the model on it."""

    name = "looking"
    acts_on = "gradient"
    needs_batch = True
    seen: list

    def init(self, view):
        return None

    def update(self, g, state, view):
        self.seen.append(view.batch)
        return g + 0 * view.gradient(view.batch), state

    def consolidate(self, state, view, task):
        return state


def points(shift: float, n: int = 48) -> tuple[Tensor, Tensor]:
    """Clouds of points around three centres."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % 3
    centres = torch.randn(3, 6, generator=generator) + shift
    return centres[labels] + torch.randn(n, 6, generator=generator), labels


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def vector(model: nn.Module, names: tuple[str, ...]) -> Tensor:
    """The protected parameters as one vector."""
    parameters = dict(model.named_parameters())
    return torch.cat([parameters[name].detach().flatten() for name in names])


def leak(guard: Guard, before: Tensor, after: Tensor, directions: Tensor | None = None) -> float:
    """How much of the way from `before` to `after` is in the protected directions."""
    if directions is None:
        directions = guard.state_dict()["memory.directions"]
    way = (after - before).double()
    assert way.norm() > 1e-3, "nothing was learned"
    return float((directions.double() @ way).norm() / way.norm())
