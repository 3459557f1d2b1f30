"""SI and the decay of online EWC against their papers' formulas in plain autograd."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from forgetless import EWC, SI, Guard, Training, fit
from forgetless.methods.si import Path
from tests.methods.formula import (
    BATCH,
    EPOCHS,
    LR,
    OPTIMIZERS,
    SEED,
    Plain,
    assert_weights,
    by_formula,
    flat,
    gradient,
    guarded,
)

METHODS = {"si": SI(strength=0.5, damping=0.01), "online ewc": EWC(strength=3.0, decay=0.7)}


class PlainSI(Plain):
    """Ω += max(0, ω) / (Δ² + ξ), with ω = −Σ g · Δθ step by step."""

    def begin(self, model):
        self.anchor = flat(model.parameters()).detach().clone()
        self.big = torch.zeros_like(self.anchor)
        self.small = torch.zeros_like(self.anchor)

    def step(self, model, x, y, g):
        theta = flat(model.parameters()).detach().requires_grad_()
        penalty = 0.5 * (self.big * (theta - self.anchor) ** 2).sum()
        return g + torch.autograd.grad(penalty, theta)[0]

    def after(self, model, before, g):
        self.small -= g * (flat(model.parameters()).detach() - before)

    def end(self, model, x, y):
        theta = flat(model.parameters()).detach().clone()
        self.big += self.small.clamp(min=0) / ((theta - self.anchor) ** 2 + 0.01)
        self.anchor, self.small = theta, torch.zeros_like(theta)


class PlainOnlineEWC(Plain):
    """F* ← γ F* + F, one sample's gradient after another."""

    fisher = None

    def step(self, model, x, y, g):
        if self.fisher is None:
            return g
        theta = flat(model.parameters()).detach()
        return g + 3.0 * self.fisher * (theta - self.anchor)

    def end(self, model, x, y):
        squares = [
            gradient(model, cross_entropy(model(x[i : i + 1]), y[i : i + 1])) ** 2
            for i in range(len(x))
        ]
        fisher = torch.stack(squares).mean(0)
        self.fisher = fisher if self.fisher is None else 0.7 * self.fisher + fisher
        self.anchor = flat(model.parameters()).detach().clone()


PLAIN = {"si": PlainSI, "online ewc": PlainOnlineEWC}
TRAINING = Training(epochs=EPOCHS, batch_size=BATCH, dtype="float64", lr=LR)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_a_guard_it_does_what_its_formula_says(name, optimizer, digits):
    found = guarded(digits, METHODS[name], OPTIMIZERS[optimizer])
    assert_weights(found, by_formula(digits, PLAIN[name](), OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_fit_beside_another_seed(name, optimizer, digits):
    settings = {"lr": LR}
    if optimizer == "adamw":
        settings = {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1}
    training = replace(TRAINING, seeds_together=2, **settings)
    trace = fit(digits, METHODS[name], seeds=[7, SEED], training=training)
    expected = by_formula(digits, PLAIN[name](), OPTIMIZERS[optimizer], anew=True)
    assert_weights(trace.weights(SEED, 2), expected)


def test_the_step_follows_the_finite_difference_of_the_penalty():
    random = [torch.rand(2, 6, dtype=torch.float64) for _ in range(4)]
    method, state = SI(strength=1.5), Path(*random[:3], random[2], random[0])
    theta, g, width = random[3], random[1], 1e-4

    class View:
        pass

    View.theta = theta
    added = method.update(g, state, View)[0] - g
    for i in range(6):
        shift = torch.zeros_like(theta)
        shift[:, i] = width
        rise = method.penalty(state, theta + shift) - method.penalty(state, theta - shift)
        torch.testing.assert_close(added[:, i], rise / (2 * width))


def test_the_path_of_small_steps_adds_up_to_the_fall_of_the_loss():
    """Σ ω = −∫ g dθ, the loss at the start less that at the end."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 6, dtype=torch.float64), torch.arange(30) % 3
    model = torch.nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard, start = Guard(model, optimizer, SI()), cross_entropy(model(x), y).item()
    for _ in range(300):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    integral = float(guard._steps.state.integral.sum())  # up to the latest step
    assert integral == pytest.approx(start - loss.item(), rel=0.01)


def test_a_head_that_grows_begins_its_way_there():
    torch.manual_seed(0)
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.arange(12) % 3
    model = torch.nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, SI())
    cross_entropy(model(x), y).backward()
    optimizer.step()
    guard.end_task((x, y))
    grown = torch.nn.Linear(6, 5).double()
    with torch.no_grad():
        grown.weight[:3], grown.bias[:3] = model.weight, model.bias
    optimizer = torch.optim.SGD(grown.parameters(), lr=0.1)
    guard.adopt(grown, optimizer)
    theta = flat(grown.parameters()).detach()
    state = guard._steps.state
    torch.testing.assert_close(state.anchor[0], theta)
    torch.testing.assert_close(state.theta[0], theta)
    weights = state.importance[0, :30].view(5, 6)
    assert (weights[:3] > 0).any()
    assert not weights[3:].any()
