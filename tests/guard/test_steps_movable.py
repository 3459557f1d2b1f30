"""What happens when only some of the protected parameters can move."""

from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

from forgetless import EWC, OGD, PCAOGD, Guard

from ..tangent.reference import by_loop
from .problems import (
    basis_of,
    exact_basis,
    flat,
    guarded,
    mlp,
    movement,
    seeded,
    task,
    train,
    wander,
)


def nearest(step: torch.Tensor, rows: torch.Tensor, movable: torch.Tensor) -> torch.Tensor:
    """The nearest step within the movable coordinates with rows · step = 0, by a dense SVD."""
    inside = step.double() * movable
    basis = basis_of(rows.double() * movable)
    return inside - (inside @ basis.T) @ basis


FREEZE = {
    "first layer": lambda m: m[0].requires_grad_(False),
    "last weight": lambda m: m[2].weight.requires_grad_(False),
    "all but a bias": lambda m: [p.requires_grad_(p is m[2].bias) for p in m.parameters()],
    "all but the biases": lambda m: [p.requires_grad_(p.dim() == 1) for p in m.parameters()],
}


@pytest.mark.parametrize("storage", ["dense", "factored"])
@pytest.mark.parametrize("freeze", FREEZE)
@pytest.mark.parametrize("method", [OGD(1000), PCAOGD(components=12)], ids=["ogd", "pca-ogd"])
def test_frozen_after_a_task(freeze, storage, method):
    """Nothing protected changes, nothing frozen moves, and the step is the nearest such one."""
    make = partial(optim.Adam, lr=1e-2)
    model, optimizer, guard = guarded(optimizer=make, storage=storage, method=method)
    rows = exact_basis(model, *task(0))
    if method.name == "pca-ogd":
        features = by_loop(mlp().double(), *task(0, dtype=torch.float64))
        rows = torch.linalg.svd(features, full_matrices=False)[2][:12]
    FREEZE[freeze](model)
    movable = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in model.parameters()])
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.requires_grad_(mine.requires_grad)
    free = movement(twin, make(twin.parameters()))
    delta = movement(model, optimizer)
    assert not delta[~movable].any()
    assert float((rows @ delta).norm()) <= 1e-5 * float(free.norm())
    expected = nearest(free, rows, movable)
    torch.testing.assert_close(delta, expected, rtol=0, atol=2e-5 * float(free.norm()))
    # And again when all can move.
    model.requires_grad_(True)
    for number in range(3):
        delta = movement(model, optimizer, number)
        assert delta[~movable].any()
        assert float((rows @ delta).norm()) <= 1e-5 * float(delta.norm())
    assert guard.stats().steps == 4


def test_a_stale_gradient_of_a_frozen_parameter():
    """Torch's optimizers go on moving what has a gradient, frozen or not; it must not leak."""
    model, optimizer, _ = guarded(optimizer=partial(optim.Adam, lr=1e-2))
    rows = exact_basis(model, *task(0))
    wander(model, optimizer, 0)
    model.requires_grad_(False)
    before = flat(model)
    optimizer.step()
    delta = flat(model) - before
    assert delta.any()
    assert float((rows @ delta).norm()) <= 1e-5 * float(delta.norm())


class TwoHeads(nn.Module):
    """A body and two heads, of which one is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 20)
        self.heads = nn.ModuleList([nn.Linear(20, 4), nn.Linear(20, 4)])
        self.used = 0

    def forward(self, x):
        return self.heads[self.used](torch.tanh(self.body(x)))


@pytest.mark.parametrize("storage", ["dense", "factored"])
def test_a_head_that_is_not_used_does_not_move(storage):
    model = seeded(TwoHeads)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    guard = Guard(model, optimizer, OGD(samples=1000), storage=storage)
    guard.end_task(task(0))
    rows = exact_basis(model, *task(0))
    old = {n: p.clone() for n, p in model.heads[0].named_parameters()}
    model.used = 1
    for number in range(5):
        delta = movement(model, optimizer, number)
        assert float((rows @ delta).norm()) <= 1e-5 * float(delta.norm())
        for name, value in model.heads[0].named_parameters():
            assert torch.equal(value, old[name])
    # Features of both heads from now on.
    guard.end_task(task(1))
    model.used = 0
    both = torch.cat([rows, exact_features_of_other_head(model)])
    delta = movement(model, optimizer)
    assert float((basis_of(both) @ delta).norm()) <= 1e-5 * float(delta.norm())


def exact_features_of_other_head(model):
    model.used = 1
    rows = exact_basis(model, *task(1))
    model.used = 0
    return rows


def test_changing_patterns_of_use_do_not_pile_up():
    model, optimizer, guard = guarded(method=OGD(5))
    parameters = list(model.parameters())
    for pattern in range(1, 16):
        optimizer.zero_grad()
        x, y = task(1)
        cross_entropy(model(x), y).backward()
        for i, p in enumerate(parameters):
            if not pattern >> i & 1:
                p.grad = None
        optimizer.step()
    assert len(guard._steps._restricted) <= 8


def test_another_optimizer_that_has_fewer_parameters():
    """What it does not train stays where it is, gradient or not."""
    model, _, guard = guarded()
    rows = exact_basis(model, *task(0))
    head_only = optim.SGD(model[2].parameters(), lr=0.1)
    guard.attach(head_only)
    body = model[0].weight.clone()
    before = flat(model)
    train(model, head_only, task(1), steps=3)
    assert torch.equal(model[0].weight, body)
    delta = flat(model) - before
    assert float((rows @ delta).norm()) <= 1e-5 * float(delta.norm())


def test_a_group_with_a_learning_rate_of_zero_stays():
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer = optim.Adam(groups, lr=1e-2)
    guard = Guard(model, optimizer, OGD(samples=1000))
    guard.end_task(task(0))
    body = model[0].weight.clone()
    train(model, optimizer, task(1), steps=3)
    assert torch.equal(model[0].weight, body)


def test_gradients_that_are_not_there_stay_absent():
    model, optimizer, _ = guarded(method=EWC(strength=3.0))
    model[0].requires_grad_(False)
    old = model[0].weight.clone()
    train(model, optimizer, task(1), steps=3)
    assert model[0].weight.grad is None
    assert torch.equal(model[0].weight, old)


class Slightly(nn.Module):
    """A parameter that moves the first input's output a little, beside one that moves all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.tiny = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.layer(x) + 3e-4 * x[:, :1] * self.tiny


@pytest.mark.parametrize("storage", ["dense", "factored"])
def test_a_direction_of_which_little_can_move_is_not_taken_for_rounding(storage):
    model = seeded(Slightly)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    guard = Guard(model, optimizer, OGD(), storage=storage)
    x = seeded(lambda: torch.randn(2, 3))
    guard.end_task((x,))
    model.layer.weight.requires_grad_(False)
    outputs = model(x)
    (model.tiny.sum() + model.layer.bias.sum()).backward()
    optimizer.step()
    # Only `tiny` and the bias can move: neither can without moving one of the two outputs.
    moved = (model(x) - outputs).norm()
    assert float(moved.detach()) < 3e-6
    assert model.tiny.norm() < 0.1
