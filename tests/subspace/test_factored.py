"""Directions as factored samples."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import forgetless
from forgetless import OGD


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
