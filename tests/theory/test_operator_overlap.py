"""The overlap matrix from operators against the one from dense features."""

import torch

from forgetless import tangent_features
from forgetless.linalg import orthonormalize
from forgetless.theory import factors, operator_overlap, overlap, overlap_spectrum


def test_the_operator_form_equals_the_dense_one():
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    ).double()
    pair = [
        tangent_features(network, torch.randn(n, 6).double(), torch.randint(3, (n,)))
        for n in (9, 5)
    ]
    p = pair[0].shape[1]
    basis = orthonormalize(torch.randn(4, p).double())
    dense = [factors(phi.dense()) for phi in pair]
    for rows in (None, basis, torch.cat([basis, torch.zeros(2, p).double()])):
        expected = overlap_spectrum(overlap(*dense, rows))
        found = overlap_spectrum(operator_overlap(*pair, rows))
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
