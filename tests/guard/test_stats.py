"""What a guard tells of its steps."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

from forgetless import OGD, PCAOGD, Guard

from .problems import exact_basis, flat, guarded, mlp, seeded, task, train, wander


def test_stats_against_an_explicit_projection():
    model, optimizer, guard = guarded(optimizer=partial(optim.Adam, lr=1e-2))
    plain = mlp()
    other = optim.Adam(plain.parameters(), lr=1e-2)
    basis = exact_basis(model, *task(0))
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    sums = {n: torch.zeros(2).double() for n in sizes}
    shares = []
    for number in range(4):
        plain.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = flat(plain)
        wander(plain, other, number)
        step = flat(plain) - before
        removed = (step @ basis.T) @ basis
        shares.append(float(removed.square().sum() / step.square().sum()))
        parts = zip(
            step.split(list(sizes.values())), removed.split(list(sizes.values())), strict=True
        )
        for name, (whole, gone) in zip(sizes, parts, strict=True):
            sums[name] += torch.stack([whole.square().sum(), gone.square().sum()])
        wander(model, optimizer, number)
    stats = guard.stats()
    assert stats.steps == 4
    assert stats.last == pytest.approx(shares[-1], rel=1e-3)
    total = sum(sums.values())
    assert stats.removed == pytest.approx(float(total[1] / total[0]), rel=1e-3)
    for name, (whole, gone) in sums.items():
        assert stats.layers[name] == pytest.approx(float(min(1.0, gone / whole)), rel=1e-2)
    assert str(stats).startswith(f"{stats.removed:6.1%} of 4 steps removed")
    guard.end_task(task(1))
    assert guard.stats().steps == 0
    assert set(guard.stats().layers.values()) == {0.0}


def test_stats_of_steps_of_nothing():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD())
    guard.end_task(task(0))
    optimizer.step()  # no gradients yet
    assert guard.stats().steps == 0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    stats = guard.stats()
    assert (stats.steps, stats.removed, stats.last) == (1, 0.0, 0.0)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-30)  # squares underflow in float32
    optimizer.step()
    assert guard.stats().removed >= 0


def crowded(method, **options):
    """A model with more samples than parameters: nothing is left to learn."""
    model = seeded(lambda: nn.Linear(12, 4))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, method, **options)
    x, y = task(0, n=200)
    guard.end_task((x, y))
    return model, optimizer, guard


@pytest.mark.parametrize("project", ["update", "gradient"])
def test_no_room_to_learn_is_said_once(project):
    model, optimizer, guard = crowded(OGD(200), project=project)
    with pytest.warns(
        UserWarning, match=r"leave no room to learn: 100\.0% of the steps is removed; keep"
    ) as caught:
        train(model, optimizer, task(1), steps=160)
    assert len(caught) == 1
    assert guard.stats().removed > 0.95
    guard.end_task(task(1))
    train(model, optimizer, task(1), steps=60)


def test_no_room_to_learn_is_said_at_the_end_of_a_short_task():
    model, optimizer, guard = crowded(OGD(200))
    train(model, optimizer, task(1), steps=5)
    with pytest.warns(UserWarning, match="leave no room to learn"):
        guard.end_task(task(1))


def test_no_warning_where_there_is_room():
    model, optimizer, guard = crowded(PCAOGD(10))
    train(model, optimizer, task(1), steps=120)
    guard.end_task(task(1))
    assert guard.stats().removed < 0.95
