"""What a method sees when a task is learned: the model in evaluation mode, in `fit` and a guard."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from forgetless import ConfigError, Guard, Method, Training, fit
from tests.conftest import blobs

TRAINING = Training(lr=0.1, epochs=2, batch_size=8)


@dataclass(frozen=True)
class Importance(Method[Any]):
    """Σ over samples of the gradient of |f|²: the same in batches of any size, or it is wrong."""

    name = "importance"
    acts_on = "gradient"
    chunk: int = 8
    count: int = 8

    def init(self, view):
        return view.theta * 0

    def update(self, g, state, view):
        return g, state

    def consolidate(self, state, view, task):
        for samples in task.batches(self.chunk):
            assert len(task.draw(self.count)) > 0
            loss = view.gradient(samples, lambda outputs, _: outputs.square().sum(2))
            state = state + len(samples) * loss
        return state


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def in_fit(method):
    """The importances, and the weights and statistics at the end."""
    trace = fit(blobs(), method, normed, training=Training(**vars(TRAINING) | {"dtype": "float64"}))
    return trace.state(0)["value"], trace.weights(seed=0, task=1)


def in_guard(method):
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(model, optimizer, method) as guard:
        for t in range(2):
            split = blobs().task(t, [0]).train
            samples = split.inputs.double(), split.labels
            model(samples[0]).square().sum().backward()
            optimizer.step()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            guard.end_task(samples)
            assert model.training
            assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
        return guard.state_dict()["memory.value"], model.state_dict()


@pytest.mark.parametrize("driver", [in_fit, in_guard])
def test_importances_do_not_depend_on_batches(driver):
    whole, weights = driver(Importance(chunk=24))
    for chunk in (1, 7):
        found, after = driver(Importance(chunk=chunk))
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)
        assert all(torch.equal(after[name], weights[name]) for name in weights)
    if driver is in_guard:  # by autograd, sample by sample
        model = normed()
        model.load_state_dict(weights)
        model.eval()
        x = blobs().task(1, [0]).train.inputs.double()
        sums = [torch.autograd.grad(model(one[None]).square().sum(), [*model.parameters()])
                for one in x]  # fmt: skip
        expected = sum(torch.cat([g.flatten() for g in grads]) for grads in sums)
        once, _ = driver(_OfLastTask(chunk=5))
        torch.testing.assert_close(once, expected, rtol=1e-9, atol=1e-9)


@dataclass(frozen=True)
class _OfLastTask(Importance):
    name = "last"

    def consolidate(self, state, view, task):
        return super().consolidate(state * 0, view, task)


@pytest.mark.parametrize("driver", [in_fit, in_guard])
@pytest.mark.parametrize("wrong", [{"chunk": 0}, {"chunk": -1}, {"count": 0}, {"count": -1}])
def test_counts_of_samples_are_at_least_one(driver, wrong):
    name = {"chunk": "batches' size", "count": "draw's count"}[next(iter(wrong))]
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of at least 1, not"):
        driver(Importance(**wrong))
