"""Rows for several seeds: each has what it would have alone."""

from unittest import mock

import pytest
import torch

from forgetless.subspace import DenseSubspace
from forgetless.tangent import features, tangent_features

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_seeds_looked_at_together_find_what_each_finds_alone(device, centred):
    torch.manual_seed(0)
    samples = torch.randn(3, 1100, 40, device=device) * torch.logspace(0, -2, 40, device=device)
    models = [torch.nn.Linear(40, 1).to(device) for _ in samples]
    phis = [tangent_features(model, x) for model, x in zip(models, samples, strict=True)]
    none = DenseSubspace.empty(torch.zeros(3, 41, device=device))
    with mock.patch.object(features, "_have_room", return_value=True):
        several = none.add_principal(phis, 7, centred=centred)
    assert several.rank == 7
    for seed, phi in enumerate(phis):
        alone = DenseSubspace.empty(torch.zeros(1, 41, device=device))
        alone = alone.add_principal([phi], 7, centred=centred)
        g = torch.randn(3, 41, device=device)
        expected = alone.project_out(g[seed : seed + 1])[0]
        torch.testing.assert_close(several.project_out(g)[seed], expected, rtol=0, atol=1e-5)
        assert several.record.shares[seed] == pytest.approx(alone.record.shares[0], rel=1e-6)
