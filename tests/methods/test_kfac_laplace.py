"""The K-FAC Laplace penalty against its formula by autograd, and against an exact Fisher matrix."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from forgetless import ConfigError, Guard, KFACLaplace
from forgetless.linalg import Layout
from forgetless.tangent import Moments

SHAPES = {"0.weight": (4, 3), "0.bias": (4,), "1.weight": (2, 4, 1, 1), "2.weight": (5,)}


def random(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def square(d, seed):
    rows = random(2, d, d, seed=seed)
    return rows @ rows.mT


class Given:
    """A view of these moments and weights, for two seeds."""

    layout = Layout(SHAPES)

    def __init__(self, seed):
        self.theta = random(2, self.layout.size, seed=seed)
        a = square(4, seed + 1)
        a = a / a[:, -1:, -1:]  # the last input is a one
        outputs = {"0.weight": square(4, seed + 2), "1.weight": square(2, seed + 3)}
        inputs = {"0.weight": a, "1.weight": square(4, seed + 4)}
        source = {name: name for name in inputs}
        squares = {"2.weight": random(2, 5, seed=seed + 5).square()}
        biases, scalars = {"0.weight": "0.bias"}, torch.zeros(2)
        self.given = Moments(outputs, inputs, source, biases, squares, 10, scalars)

    def moments(self, samples, outputs):
        assert outputs == "fisher"
        return self.given


class Task:
    def draw(self, count):
        return None


def penalty(tasks, theta, anchor):
    """½ K tr(G ΔW A ΔWᵀ) with mean factors, of both seeds together."""
    parts = Layout(SHAPES).split(theta - anchor)
    count, total = len(tasks), 0.0
    for name in ("0.weight", "1.weight"):
        step = parts[name].flatten(2)
        if name == "0.weight":
            step = torch.cat([step, parts["0.bias"].unsqueeze(2)], 2)
        g = sum(t.given.outputs[name] / 10 for t in tasks) / count
        a = sum(t.given.inputs[name] for t in tasks) / count
        total = total + count * (g @ step @ a * step).sum() / 2
    squares = sum(t.given.squares["2.weight"] / 10 for t in tasks) / count
    return total + count * (squares * parts["2.weight"].square()).sum() / 2


@pytest.mark.parametrize("tasks", [1, 3])
def test_it_follows_the_gradient_of_its_penalty(tasks):
    method = KFACLaplace(strength=0.7)
    views = [Given(10 * number) for number in range(tasks)]
    state = method.init(views[0])
    for view in views:
        state = method.consolidate(state, view, Task())
    torch.testing.assert_close(state.anchor, views[-1].theta)
    view, g = Given(99), random(2, Layout(SHAPES).size, seed=98)
    theta = view.theta.clone().requires_grad_()
    (added,) = torch.autograd.grad(penalty(views, theta, views[-1].theta), theta)
    found, after = method.update(g, state, view)
    assert after is state
    torch.testing.assert_close(found, g + 0.7 * added, rtol=1e-9, atol=1e-9)


def test_it_is_the_exact_fisher_where_that_is_a_product():
    """A linear classifier on one input x: F = (diag(p) − p pᵀ) ⊗ x xᵀ."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    guard = Guard(
        model, torch.optim.SGD(model.parameters(), lr=1), KFACLaplace(samples=20000), seed=1
    )
    x = torch.tensor([[0.5, -1.0, 2.0, 0.1]], dtype=torch.float64)
    guard.end_task((x.expand(20000, -1), torch.zeros(20000, dtype=torch.long)))
    p = torch.softmax(model(x), 1)[0].detach()
    extended = torch.cat([x[0], torch.ones(1, dtype=torch.float64)])
    moved = random(3, 5, seed=4)
    exact = (torch.diag(p) - torch.outer(p, p)) @ moved @ torch.outer(extended, extended)
    with torch.no_grad():
        model.weight += moved[:, :4]
        model.bias += moved[:, 4]
    g = torch.zeros(1, 15, dtype=torch.float64)
    view = guard._steps.view(guard._model.parameters.read())
    found = guard.method.update(g, guard._steps.state, view)[0]
    found = torch.cat([found[:, :12].view(3, 4), found[:, 12:].view(3, 1)], 1)
    assert (found - exact).norm() < 0.05 * exact.norm()


def test_it_keeps_outputs_that_plain_training_moves():
    moved = {}
    for strength in (0.0, 10.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = Guard(model, optimizer, KFACLaplace(strength=strength))
        x, y = random(30, 5, seed=0), torch.arange(30) % 3
        guard.end_task((x, y))
        before = model(x).detach()
        for _ in range(50):
            optimizer.zero_grad()
            cross_entropy(model(random(30, 5, seed=1) + 2), y).backward()
            optimizer.step()
        moved[strength] = float((model(x).detach() - before).norm())
    assert moved[10.0] < 0.5 * moved[0.0]


def test_what_it_stores_does_not_grow():
    sizes = []
    for tasks in (1, 4):
        model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), KFACLaplace())
        for number in range(tasks):
            guard.end_task((random(20, 5, seed=number).float(), torch.arange(20) % 3))
        sizes.append(guard.memory_report().bytes)
    assert sizes[0] == sizes[1]


def test_a_model_that_changes_how_it_uses_a_weight_is_refused():
    method, view = KFACLaplace(), Given(0)
    state = method.consolidate(method.init(view), view, Task())
    other = Given(1)
    other.given = Moments(
        other.given.outputs, other.given.inputs, other.given.source, {}, {}, 10, torch.zeros(2)
    )
    with pytest.raises(ConfigError, match="in another way than in earlier tasks"):
        method.consolidate(state, other, Task())
