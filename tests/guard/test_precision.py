"""Autocast and scaled gradients: nothing is projected in half precision."""

from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

from forgetless import OGD, ConfigError, Guard, forecast, tangent_features

from .problems import CLASSES, INPUTS, exact_basis, flat, guarded, leaks, mlp, task
from .test_leaks import assert_holds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["step outside", "step inside"])
def test_autocast_and_grad_scaler(dtype, options, inside):
    """A step inside of autocast must not be projected in half precision."""
    model = mlp()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)
    guard = Guard(model, optimizer, OGD(samples=1000))
    basis = exact_basis(model, *task(0))
    x, y = task(1)
    with torch.autocast("cpu", dtype, enabled=inside):
        guard.end_task(task(0))

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        with torch.autocast("cpu", dtype, enabled=inside):
            scaler.step(optimizer)
        scaler.update()

    assert_holds(leaks(model, basis, step, count=60))


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("project", ["update", "gradient"])
def test_a_step_that_overflows_is_left_out(options, project):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    guard = Guard(model, optimizer, OGD(samples=1000), project=project)
    guard.end_task(task(0))
    before = flat(model)
    x, y = task(1)
    for scale in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y) * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(flat(model), before) == (scale != 1.0)
    assert 0 < guard.stats().removed < 1


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_scaled_gradients_are_projected_as_unscaled_ones(options):
    x, y = task(1)
    found = []
    for scale in (1.0, 1024.0):
        optimizer_of = partial(optim.SGD, lr=0.1, **options)
        model, optimizer, guard = guarded(optimizer=optimizer_of, project="gradient")
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        found.append((flat(model), guard.stats().removed))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


def test_a_model_of_two_precisions_is_refused():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES).double()

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)).double())

    model, (x, y) = Mixed(), task(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = "parameters must be of one precision, not float32 and float64"
    with pytest.raises(ConfigError, match=message):
        Guard(model, optimizer, OGD(samples=5))
    with pytest.raises(ConfigError, match=message):
        tangent_features(model, x, y)
    with pytest.raises(ConfigError, match=message):
        forecast(model, (x, y), (x, y), lr=0.1)


def test_inputs_of_another_precision_than_a_layers_are_said_to_be_why():
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(INPUTS, 8).bfloat16(), nn.Linear(8, CLASSES)

        def forward(self, x):
            return self.head(self.body(x.bfloat16()).float())

    model = Half()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), OGD(samples=5))
    with pytest.raises(ConfigError, match="are bfloat16 and float32, and a guard computes with"):
        guard.end_task(task(0))
