"""Directions as rows: several seeds, rounding."""

import pytest
import torch
from torch import nn

import forgetless
from forgetless import OGD, PCAOGD
from forgetless.subspace import DenseSubspace
from forgetless.tangent import tangent_features

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_seeds_looked_at_together_find_what_each_finds_alone(device, centred):
    torch.manual_seed(0)
    samples = torch.randn(3, 1100, 40, device=device) * torch.logspace(0, -2, 40, device=device)
    models = [torch.nn.Linear(40, 1).to(device) for _ in samples]
    phis = [tangent_features(model, x) for model, x in zip(models, samples, strict=True)]
    none = DenseSubspace.empty(torch.zeros(3, 41, device=device))
    several = none.add_principal(phis, 7, centred=centred)
    assert several.rank == 7
    for seed, phi in enumerate(phis):
        alone = DenseSubspace.empty(torch.zeros(1, 41, device=device))
        alone = alone.add_principal([phi], 7, centred=centred)
        g = torch.randn(3, 41, device=device)
        expected = alone.project_out(g[seed : seed + 1])[0]
        torch.testing.assert_close(several.project_out(g)[seed], expected, rtol=0, atol=1e-5)
        assert several.record.shares[seed] == pytest.approx(alone.record.shares[0], rel=1e-6)


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
