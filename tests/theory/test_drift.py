"""Drift of networks between two states."""

import copy

import torch
from torch import nn

from forgetless.theory import (
    LinearTask,
    NoProjection,
    drift,
    learn,
    model_drift,
    squared_drift,
    true_class,
)
from tests.theory.problems import autograd_features, generator, mlp, seeded

G = generator(7)


def test_drift_is_of_the_true_class():
    before = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    after = torch.tensor([[9.0, 2.5], [0.0, 9.0]])
    y = torch.tensor([1, 0])
    assert true_class(before, y).tolist() == [2, 3]
    assert drift(before, after, y).tolist() == [0.5, -3]
    assert squared_drift(before, after, y) == 9.25
    assert squared_drift(before[:, :1], after[:, :1]) == 73
    assert drift(before[:, 0], after[:, 0]).tolist() == [8, -3]


def test_outputs_may_carry_a_graph():
    outputs = torch.ones(3, requires_grad=True)
    assert squared_drift(outputs, 2 * outputs) == 3


def test_a_network_and_two_states():
    def build():
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))

    model = seeded(build).float()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1
    other(torch.randn(16, 4, generator=G))  # moves the statistics of the other's batch norm
    x, y = torch.randn(7, 4, generator=G), torch.arange(7) % 3
    expected = (other.eval()(x) - copy.deepcopy(model).eval()(x))[torch.arange(7), y]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: value.clone() for name, value in before.items()}
    delta = model_drift(model, state, other.state_dict(), x, y, chunk=3)
    torch.testing.assert_close(delta.float(), expected)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(torch.equal(before[k], v) for k, v in state.items())
    assert all(module.training for module in model.modules())


def test_tied_weights():
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))).float()
    model[2].weight = model[0].weight
    state = {name: value + 0.5 for name, value in model.state_dict().items()}
    x, y = torch.randn(4, 3, generator=G), torch.tensor([0, 1, 2, 0])
    delta = model_drift(model, model.state_dict(), state, x, y)
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    torch.testing.assert_close(delta.float(), (other(x) - model(x)).gather(1, y[:, None])[:, 0])


def test_a_small_step_drifts_as_the_linearised_learner_says():
    # Strong weight decay keeps the network where its linearisation is right.
    model = seeded(mlp)
    x, y = torch.randn(6, 5, generator=G, dtype=torch.float64), torch.arange(6) % 3
    outputs = model(x).detach()[torch.arange(6), y]
    phi = autograd_features(model, x, y)
    solved = learn([LinearTask(phi, outputs + 1, outputs)], NoProjection(), weight_decay=1e6)
    before = model.state_dict()
    shift = dict(zip(before, solved.steps[0].split([v.numel() for v in before.values()])))
    after = {name: value + shift[name].reshape(value.shape) for name, value in before.items()}
    delta = model_drift(model, before, after, x, y)
    assert float(delta.norm()) > 1e-8
    torch.testing.assert_close(delta, phi @ solved.steps[0], rtol=1e-4, atol=1e-12)
