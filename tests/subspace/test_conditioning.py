"""Directions that nearly depend on each other: a projection never makes a step longer."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import forgetless
from forgetless import OGD, PCAOGD


def biases_and_head(seed: int) -> tuple[nn.Module, list[str]]:
    """A network whose protected parameters are few, so that samples soon fill their space."""
    torch.manual_seed(seed)
    layers = [nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 3)]
    model = nn.Sequential(*layers)
    names = [n for n, _ in model.named_parameters() if "bias" in n or n.startswith("4")]
    return model, names


@pytest.mark.filterwarnings("ignore:the protected directions leave no room")
@pytest.mark.parametrize("storage", ["dense", "factored", "bfloat16"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_step_becomes_longer_as_directions_fill_the_space(storage, seed):
    model, names = biases_and_head(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    guard = forgetless.Guard(model, optimizer, OGD(20), storage=storage, params=names)
    mine = [p for n, p in model.named_parameters() if n in names]
    for _ in range(6):
        x, y = torch.randn(20, 5), torch.randint(0, 3, (20,))
        for _ in range(3):
            before = parameters_to_vector(mine).detach()
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            plain = 0.05 * torch.cat([p.grad.flatten() for p in mine])
            optimizer.step()
            step = before - parameters_to_vector(mine).detach()
            assert step.norm() <= 1.01 * plain.norm()
        guard.end_task((x, y))
    assert guard.memory_report().directions <= len(before)


@pytest.mark.parametrize("method", [OGD(60), PCAOGD(50), PCAOGD(variance=0.999)], ids=str)
@pytest.mark.parametrize("widths", [(4, 8, 3), (6, 10, 3)])
def test_rounded_rows_stay_orthonormal_until_they_fill_the_space(method, widths):
    """What rounding leaves of a vector inside of the rows is no new direction."""
    inputs, hidden, outputs = widths
    torch.manual_seed(10)
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
    guard = forgetless.Guard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), method, storage="bfloat16"
    )
    for _ in range(4):
        guard.end_task((torch.randn(60, inputs), torch.randint(0, outputs, (60,))))
        rows = guard.state_dict()["memory.directions"].double()
        assert len(rows) <= rows.shape[1]
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)).double(), atol=0.01, rtol=0)


def test_factored_samples_protect_as_rows_do_where_they_nearly_depend_on_each_other():
    """Two inputs and a smooth network: a hundred samples in far fewer directions."""
    leaks = {}
    for storage in ("dense", "factored"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        guard = forgetless.Guard(model, optimizer, OGD(100), storage=storage)
        x, y = torch.randn(100, 2), torch.randint(0, 2, (100,))
        phi = forgetless.tangent_features(model, x, y).dense().double()
        guard.end_task((x, y))
        before = parameters_to_vector(model.parameters()).detach().double()
        optimizer.zero_grad()
        cross_entropy(model(torch.randn(100, 2)), torch.randint(0, 2, (100,))).backward()
        plain = 0.05 * torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        optimizer.step()
        step = before - parameters_to_vector(model.parameters()).detach().double()
        leaks[storage] = float(((phi @ step).abs() / phi.norm(dim=1)).max() / plain.norm())
    assert max(leaks.values()) < 1e-5
