"""Per-sample gradients against a plain loop of autograd calls, in float64."""

import pytest
import torch
from torch import nn

from forgetless.models import MLP, LeNet
from forgetless.tangent import TangentFeatures, tangent_features
from forgetless.tangent.blocks import LinearBlock, RowBlock


class Tied(nn.Module):
    """One weight used by a layer and, transposed, once more by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.layer(x)) @ self.layer.weight


class Recurrent(nn.Module):
    """A layer that runs three times, and one that runs on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(6, 6)
        self.along = nn.Linear(1, 3)
        self.last = nn.Linear(18, 4)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.last(self.along(x.unsqueeze(-1)).flatten(1))


class Inplace(nn.Module):
    """Activations that overwrite the layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 5, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(5, 4),
            nn.ELU(inplace=True),
        )

    def forward(self, x):
        return self.net(x)


def image_net() -> nn.Module:
    return LeNet((1, 8, 8), hidden=7, outputs=4)


MODELS = {
    "mlp": (lambda: MLP(6, 5, 4), (6,), 3),
    "lenet": (image_net, (1, 8, 8), 2),
    "tied": (Tied, (6,), 0),
    "recurrent": (Recurrent, (6,), 1),
    "in place": (Inplace, (6,), 2),
}


def setup(name: str, n: int = 9) -> tuple[nn.Module, torch.Tensor, torch.Tensor, int]:
    make, shape, factored = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make().double().eval()
    inputs = torch.randn(n, *shape, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 4, (n,), generator=generator)
    return module, inputs, labels, factored


def true_class(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.gather(1, labels.unsqueeze(1)).squeeze(1)


def features(module, inputs, labels, names=None, chunk=4) -> TangentFeatures:
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = names or [n for n, _ in module.named_parameters()]
    return tangent_features(module, values, inputs, true_class, labels, names=names, chunk=chunk)


def by_loop(module, inputs, labels, names=None) -> torch.Tensor:
    parameters = dict(module.named_parameters())
    chosen = [parameters[n] for n in names or parameters]
    rows = []
    for x, y in zip(inputs, labels, strict=True):
        grads = torch.autograd.grad(module(x[None])[0, y], chosen)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", MODELS)
def test_everything_agrees_with_a_loop_of_autograd_calls(name):
    module, inputs, labels, factored = setup(name)
    phi, dense = features(module, inputs, labels), by_loop(module, inputs, labels)
    weights = torch.randn(3, len(inputs), dtype=torch.float64)
    close = {"atol": 1e-10, "rtol": 1e-9}
    assert phi.shape == dense.shape
    torch.testing.assert_close(phi.dense(), dense, **close)
    torch.testing.assert_close(phi.gram(), dense @ dense.T, **close)
    torch.testing.assert_close(phi.combine(weights), weights @ dense, **close)
    torch.testing.assert_close(phi.squared_sum(), dense.square().sum(0), **close)
    # Which layers were held as factors is part of the promise: none falls back unnoticed.
    assert sum(isinstance(b, LinearBlock) for b in phi.blocks) == factored


def test_a_choice_of_parameters_in_any_order():
    module, inputs, labels, _ = setup("mlp")
    names = ["head.bias", "body.3.weight"]
    phi = features(module, inputs, labels, names)
    torch.testing.assert_close(phi.dense(), by_loop(module, inputs, labels, names))
    torch.testing.assert_close(phi.gram(), phi.dense() @ phi.dense().T)
    assert not any(isinstance(b, RowBlock) for b in phi.blocks)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_top_directions_are_the_right_singular_vectors(name, centred):
    module, inputs, labels, _ = setup(name, n=12)
    dense = by_loop(module, inputs, labels)
    if centred:
        dense = dense - dense.mean(0)
    _, sigma, v = torch.linalg.svd(dense, full_matrices=False)
    values, directions = features(module, inputs, labels).top(4, centred=centred)
    torch.testing.assert_close(values, sigma[:4], rtol=1e-9, atol=0)
    cosines = (directions * v[:4]).sum(1).abs()
    torch.testing.assert_close(cosines, torch.ones(4).double(), rtol=1e-8, atol=0)


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_share_of_variance_takes_the_fewest_directions_that_reach_it(share):
    module, inputs, labels, _ = setup("mlp", n=12)
    energy = torch.linalg.svdvals(by_loop(module, inputs, labels)).square()
    explained = energy.cumsum(0) / energy.sum()
    values, _ = features(module, inputs, labels).top(share)
    kept = len(values)
    assert explained[kept - 1] >= share
    assert kept == 1 or explained[kept - 2] < share


def test_no_more_directions_than_the_rank():
    module, inputs, labels, _ = setup("mlp")
    twice = torch.cat([inputs, inputs])
    values, directions = features(module, twice, torch.cat([labels, labels])).top(18)
    assert len(values) == len(inputs)
    gram = directions @ directions.T
    torch.testing.assert_close(gram, torch.eye(len(gram)).double(), atol=1e-8, rtol=0)
