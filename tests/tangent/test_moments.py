"""Kronecker moments against sums over per-sample gradients of autograd, in float64."""

import torch
from torch import nn
from torch.nn.functional import unfold

from forgetless.tangent import kronecker_moments, tangent_features
from tests.tangent.reference import CLOSE, built, by_loop, integers, random


def moments_of(model, x):
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return kronecker_moments(tangent_features(model, x), shapes)


def columns_of(model, name):
    start = 0
    for other, p in model.named_parameters():
        if other == name:
            return slice(start, start + p.numel())
        start += p.numel()
    raise KeyError(name)


def with_one(inputs):
    return torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)


def test_linear_layers():
    model = built(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = random(7, 4)
    rows = by_loop(model, x)
    weights, rest = moments_of(model, x)
    assert not rest
    inputs = {"0.weight": x, "2.weight": model[1](model[0](x)).detach()}
    for name, a in inputs.items():
        # A bias has the gradient δ.
        delta = rows[:, columns_of(model, name.replace("weight", "bias"))]
        torch.testing.assert_close(weights[name].outputs, delta.T @ delta, **CLOSE)
        a = with_one(a)
        torch.testing.assert_close(weights[name].inputs, a.T @ a / len(a), **CLOSE)


def test_where_every_output_has_the_same_gradient_the_product_is_exact():
    model = built(lambda: nn.Linear(4, 3))
    x = random(6, 4)
    moments = moments_of(model, x)[0]["weight"]
    rows = by_loop(model, x)
    ours = torch.kron(moments.outputs, moments.inputs)  # of weight and bias, a row each
    weight, bias = rows[:, :12].view(-1, 3, 4), rows[:, 12:].unsqueeze(2)
    joined = torch.cat([weight, bias], 2).flatten(1)
    torch.testing.assert_close(ours, joined.T @ joined, **CLOSE)


def test_convolutions_sum_over_positions():
    model = built(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2)
        )
    )
    x = random(5, 2, 4, 4)
    moments = moments_of(model, x)[0]["0.weight"]
    z = model[0](x).detach().requires_grad_()
    outputs = model[3](model[2](model[1](z)))
    delta = torch.cat(
        [torch.autograd.grad(outputs[:, c].sum(), z, retain_graph=True)[0] for c in range(2)]
    )
    delta = delta.flatten(2).transpose(1, 2).reshape(-1, 3)
    torch.testing.assert_close(moments.outputs, delta.T @ delta, **CLOSE)
    patches = with_one(unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, 18))
    torch.testing.assert_close(moments.inputs, patches.T @ patches / len(patches), **CLOSE)


def test_embeddings_count_tokens():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.head = nn.Embedding(6, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(torch.tanh(self.tokens(x)).mean(1))

    model, x = built(Tagger), integers(6, 5, 3)
    moments = moments_of(model, x)[0]["tokens.weight"]
    assert moments.bias == ""
    counts = torch.bincount(x.flatten(), minlength=6).double()
    torch.testing.assert_close(moments.outputs, 2 * counts, **CLOSE)  # for two outputs
    z = model.tokens(x).detach().requires_grad_()
    outputs = model.head(torch.tanh(z).mean(1))
    delta = torch.cat(
        [torch.autograd.grad(outputs[:, c].sum(), z, retain_graph=True)[0] for c in range(2)]
    ).flatten(0, 1)
    torch.testing.assert_close(moments.inputs, delta.T @ delta / len(delta), **CLOSE)


def test_everything_else_has_its_exact_diagonal():
    class Odd(nn.Module):
        """A norm, a weight that two layers share, a bare parameter and a grouped convolution."""

        def __init__(self):
            super().__init__()
            self.norm, self.scale = nn.LayerNorm(4), nn.Parameter(torch.ones(4))
            self.grouped = nn.Conv1d(4, 4, 1, groups=2)
            self.tokens, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
            self.head.weight = self.tokens.weight

        def forward(self, x):
            z = self.scale * self.norm(torch.tanh(self.tokens(x)))
            return self.head(self.grouped(z.mT).mean(2))

    model, x = built(Odd), integers(5, 6, 3)
    weights, rest = moments_of(model, x)
    assert not weights
    rows = by_loop(model, x)
    for name, found in rest.items():
        squares = rows[:, columns_of(model, name)].square().sum(0)
        torch.testing.assert_close(found.flatten(), squares, **CLOSE)
    assert set(rest) == {name for name, _ in model.named_parameters()}


def test_chunks_add_up():
    model = built(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    x = random(9, 4)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    whole, parts = (
        kronecker_moments(tangent_features(model, x, chunk=chunk), shapes)[0] for chunk in (9, 2)
    )
    for name in whole:
        torch.testing.assert_close(whole[name].outputs, parts[name].outputs, **CLOSE)
        torch.testing.assert_close(whole[name].inputs, parts[name].inputs, **CLOSE)
