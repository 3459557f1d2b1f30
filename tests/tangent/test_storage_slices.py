"""Columns of parts of the parameters are those columns of the whole, however they are held."""

import pytest
import torch
from torch import nn

from forgetless import tangent_features
from forgetless.linalg import ParameterSlice
from forgetless.tangent import sliced_features


class Tokens(nn.Module):
    """An embedding whose table is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Linear(3, 4)

    def forward(self, x):
        return self.head(self.table(x).mean(1).tanh())


def images():
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Conv2d(6, 3, 2), nn.Flatten(), nn.Linear(27, 7)
    )


NETWORKS = {
    "conv": (images, lambda g: torch.randn(9, 4, 6, 6, generator=g)),
    "norm": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 7)),
        lambda g: torch.randn(9, 4, generator=g),
    ),
    "tokens": (Tokens, lambda g: torch.randint(7, (9, 4), generator=g)),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("ranks", [2, 8])
def test_parts_are_columns_of_the_whole(network, dim, ranks):
    make, inputs = NETWORKS[network]
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = make().double()
    x = inputs(generator)
    x = x.double() if x.is_floating_point() else x
    y = torch.randint(7, (9,), generator=generator)
    phi = tangent_features(model, x, y)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    gram, seen = torch.zeros(9, 9).double(), 0
    for rank in range(ranks):
        shares, columns, start = {}, [], 0
        for name, size in zip(phi.names, phi.sizes, strict=True):
            shape = shapes[name]
            cut = dim % len(shape)
            each = -(-shape[cut] // ranks)
            low = min(shape[cut], rank * each)
            shares[name] = ParameterSlice(shape, cut, low, min(shape[cut], low + each))
            index = torch.arange(start, start + size).view(shape)
            columns.append(index.narrow(cut, low, shares[name].stop - low).flatten())
            start += size
        part = sliced_features(phi, shares)
        expected = phi.dense()[:, torch.cat(columns)]
        assert part.shape == expected.shape
        torch.testing.assert_close(part.dense(), expected, atol=1e-12, rtol=0)
        weights = torch.randn(3, 9, generator=generator).double()
        torch.testing.assert_close(part.combine(weights), weights @ expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(part.gram(), expected @ expected.T, atol=1e-12, rtol=0)
        gram += part.gram()
        seen += part.shape[1]
    assert seen == phi.shape[1]
    torch.testing.assert_close(gram, phi.gram(), atol=1e-12, rtol=0)
