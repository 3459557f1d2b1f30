"""Kronecker moments against sums over per-sample gradients of autograd, in float64."""

import pytest
import torch
from torch import nn
from torch.nn.functional import unfold

from forgetless import ConfigError
from forgetless.tangent import (
    Batch,
    Moments,
    drawn_likelihood,
    inputs,
    kronecker_moments,
    moments,
    probed,
)
from tests.tangent.reference import CLOSE, built, by_loop, integers, random


def all_outputs(outputs):
    return outputs


def moments_of(model, *parts, scalar=all_outputs, targets=()):
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    batches = [Batch((x,), {}, targets) for x in parts]
    names = [name for name, _ in model.named_parameters()]
    return kronecker_moments(model, values, batches, scalar, names=names)


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
    found = moments_of(model, x)
    assert not found.squares
    assert found.samples == 7
    inputs = {"0.weight": x, "2.weight": model[1](model[0](x)).detach()}
    for name, a in inputs.items():
        # A bias has the gradient δ.
        delta = rows[:, columns_of(model, name.replace("weight", "bias"))]
        torch.testing.assert_close(found.outputs[name], delta.T @ delta, **CLOSE)
        a = with_one(a)
        torch.testing.assert_close(found.inputs[name], a.T @ a / len(a), **CLOSE)


def test_where_every_output_has_the_same_gradient_the_product_is_exact():
    model = built(lambda: nn.Linear(4, 3))
    x = random(6, 4)
    found = moments_of(model, x)
    rows = by_loop(model, x)
    ours = torch.kron(
        found.outputs["weight"], found.inputs["weight"]
    )  # of weight and bias, a row each
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
    found = moments_of(model, x)
    z = model[0](x).detach().requires_grad_()
    outputs = model[3](model[2](model[1](z)))
    delta = torch.cat(
        [torch.autograd.grad(outputs[:, c].sum(), z, retain_graph=True)[0] for c in range(2)]
    )
    delta = delta.flatten(2).transpose(1, 2).reshape(-1, 3)
    torch.testing.assert_close(found.outputs["0.weight"], delta.T @ delta, **CLOSE)
    patches = with_one(unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, 18))
    torch.testing.assert_close(
        found.inputs["0.weight"], patches.T @ patches / len(patches), **CLOSE
    )


def test_embeddings_count_tokens():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.head = nn.Embedding(6, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(torch.tanh(self.tokens(x)).mean(1))

    model, x = built(Tagger), integers(6, 5, 3)
    found = moments_of(model, x)
    assert "tokens.weight" not in found.biases
    counts = torch.bincount(x.flatten(), minlength=6).double()
    torch.testing.assert_close(found.outputs["tokens.weight"], counts, **CLOSE)
    z = model.tokens(x).detach().requires_grad_()
    outputs = model.head(torch.tanh(z).mean(1))
    delta = torch.cat(
        [torch.autograd.grad(outputs[:, c].sum(), z, retain_graph=True)[0] for c in range(2)]
    ).flatten(0, 1)
    mean = delta.T @ delta / x.numel()  # summed over the two outputs
    torch.testing.assert_close(found.inputs["tokens.weight"], mean, **CLOSE)
    # Shrunk is what has the gradients: of an embedding not the counts.
    shrunk = Moments.of_seeds([found]).shrunk(0.3)
    assert torch.equal(shrunk.outputs["tokens.weight"][0], counts)
    towards = 0.7 * mean + 0.3 * mean.trace() / 4 * torch.eye(4)
    torch.testing.assert_close(shrunk.inputs["tokens.weight"][0], towards, **CLOSE)
    assert torch.equal(shrunk.inputs["head.weight"][0], found.inputs["head.weight"])


def test_everything_else_has_its_exact_diagonal():
    class Odd(nn.Module):
        """Norms, a bare parameter, a grouped convolution and a weight used as it is."""

        def __init__(self):
            super().__init__()
            self.norm, self.scale = nn.LayerNorm((3, 4)), nn.Parameter(torch.ones(4))
            self.grouped, self.channels = nn.Conv1d(4, 4, 1, groups=2), nn.GroupNorm(2, 4)
            self.twice, self.unused = nn.Linear(4, 4), nn.Linear(2, 2)

        def forward(self, x):
            z = self.scale * self.norm(torch.tanh(self.twice(x)))
            return self.channels(self.grouped(z.mT)).mean(2) @ self.twice.weight

    model, x = built(Odd), random(6, 3, 4)
    found = moments_of(model, x)
    assert set(found.squares) == {name for name, _ in model.named_parameters()}
    rows = by_loop(model, x)
    for name, square in found.squares.items():
        squares = rows[:, columns_of(model, name)].square().sum(0)
        torch.testing.assert_close(square.flatten(), squares, **CLOSE)
        assert square.shape == dict(model.named_parameters())[name].shape


def test_a_shared_weight_has_one_product_with_the_trace_of_all():
    class Tied(nn.Module):
        def __init__(self, tied=True):
            super().__init__()
            self.tokens, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            if tied:
                self.head.weight = self.tokens.weight

        def forward(self, x):
            return self.head(torch.tanh(self.tokens(x)).mean(1))

    tied, x = built(Tied), integers(5, 6, 3)
    apart = built(lambda: Tied(False))
    with torch.no_grad():
        for p in apart.parameters():
            p.copy_(tied.tokens.weight)
    one, two = moments_of(tied, x), moments_of(apart, x)
    assert list(one.outputs) == ["tokens.weight"]
    assert one.outputs["tokens.weight"].shape == (5,)  # of the embedding's one-hot gradients

    def energy(found, name):
        g = found.outputs[name]
        g = g if g.dim() == 1 else g.diagonal()
        return g.sum() * found.inputs[found.source[name]].trace()

    both = energy(two, "tokens.weight") + energy(two, "head.weight")
    torch.testing.assert_close(energy(one, "tokens.weight"), both, **CLOSE)


class Attention(nn.Module):
    """Queries, keys and values of the same inputs; keys without a bias."""

    def __init__(self, copies=False):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 3), nn.Linear(4, 3, bias=False), nn.Linear(4, 2)
        self.copies = copies

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return (q @ k.mT).softmax(-1) @ self.v(x.clone() if self.copies else x)


def test_layers_with_the_same_inputs_share_their_moment():
    x = random(6, 5, 4)

    def mean(outputs):
        return outputs.mean(1)

    shared = moments_of(built(Attention), x, scalar=mean)
    apart = moments_of(built(lambda: Attention(copies=True)), x, scalar=mean)
    assert shared.source == {"q.weight": "q.weight", "k.weight": "k.weight", "v.weight": "q.weight"}
    assert apart.source["v.weight"] == "v.weight"
    assert set(shared.inputs) == {"q.weight", "k.weight"}
    for name, moment in apart.outputs.items():
        torch.testing.assert_close(shared.outputs[name], moment, **CLOSE)
        a = shared.inputs[shared.source[name]]
        torch.testing.assert_close(a, apart.inputs[apart.source[name]], **CLOSE)


def test_inputs_that_are_the_same_for_some_samples_only_are_refused():
    class Switching(Attention):
        def forward(self, x):
            self.copies = x.shape[1] > 5
            return super().forward(x).mean(1)

    with pytest.raises(ConfigError, match=r"v.weight and q.weight have the same inputs for some"):
        moments_of(built(Switching), random(4, 5, 4), random(4, 6, 4))


def test_parts_add_up():
    model = built(lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)))
    x = random(40, 4)  # more than go through the network at first
    whole, parts = moments_of(model, x), moments_of(model, x[:9], x[9:])
    rows = by_loop(model, x)
    for name in whole.outputs:
        torch.testing.assert_close(whole.outputs[name], parts.outputs[name], **CLOSE)
        torch.testing.assert_close(whole.inputs[name], parts.inputs[name], **CLOSE)
        delta = rows[:, columns_of(model, name.replace("weight", "bias"))]
        torch.testing.assert_close(whole.outputs[name], delta.T @ delta, **CLOSE)
    torch.testing.assert_close(whole.squares, parts.squares, **CLOSE)


def test_of_very_many_rows_some_stand_for_all(monkeypatch):
    model = built(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten()))
    x = random(64, 2, 10, 10)
    whole = moments_of(model, x, scalar=lambda z: z.sum(1))
    monkeypatch.setattr(inputs, "_AT_LEAST", 600)
    some = moments_of(model, x, scalar=lambda z: z.sum(1))
    a, b = whole.inputs["0.weight"], some.inputs["0.weight"]
    assert not torch.equal(a, b)
    assert (a - b).norm() < 0.25 * a.norm()
    torch.testing.assert_close(b[-1, -1], torch.tensor(1.0).double())
    torch.testing.assert_close(whole.outputs, some.outputs, **CLOSE)


def test_very_many_outputs_have_their_diagonal(monkeypatch):
    model, x = built(lambda: nn.Linear(4, 6)), random(7, 4)
    whole = moments_of(model, x)
    monkeypatch.setattr(moments, "_LARGEST", 5)
    found = moments_of(model, x)
    diagonal = whole.outputs["weight"].diagonal()
    torch.testing.assert_close(found.outputs["weight"], diagonal, **CLOSE)
    shrunk = Moments.of_seeds([found]).shrunk(0.3).outputs["weight"][0]
    torch.testing.assert_close(shrunk, 0.7 * diagonal + 0.3 * diagonal.mean(), **CLOSE)


def test_random_signs_stand_for_all_outputs():
    """Over all signs the mean of the moments is that of every output on its own."""
    model = built(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    x = random(5, 3)
    every = moments_of(model, x)
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double()
    several = [
        moments_of(model, x, scalar=probed, targets=(row.expand(5, 2),)).outputs for row in signs
    ]
    for name, moment in every.outputs.items():
        torch.testing.assert_close(sum(of[name] for of in several) / 2, moment, **CLOSE)


def test_drawn_labels_have_the_fishers_moments():
    """With labels at every quantile each is drawn as often as the model says."""
    model, x = built(lambda: nn.Linear(3, 3)), random(1, 3)
    quantiles = (torch.arange(20000).double() + 0.5) / 20000
    many = x.expand(20000, 3)
    found = moments_of(model, many, scalar=drawn_likelihood, targets=(quantiles,))
    p = model(x).softmax(-1)[0].detach()
    fisher = torch.diag(p) - torch.outer(p, p)  # of the logits
    torch.testing.assert_close(found.outputs["weight"] / 20000, fisher, atol=1e-4, rtol=0)


def test_drawn_labels_of_sequences_are_counted_where_they_should_be():
    logits = random(2, 4, 3).requires_grad_()
    counted = torch.tensor([[True, False, True, True], [False, False, False, True]])
    drawn_likelihood(logits, torch.rand(2, 4), counted).sum().backward()
    assert torch.equal(logits.grad.abs().sum(2) > 0, counted)


class TorchAttention(nn.Module):
    """Self-attention, or with keys of its own, and a linear layer after it."""

    def __init__(self, crossed=False, **settings):
        super().__init__()
        self.crossed = crossed
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **settings)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        keys = 2 * x if self.crossed else x
        mixed, _ = self.attention(x, keys, keys, need_weights=False)
        return self.head(mixed).mean(1)


@pytest.mark.parametrize("bias", [True, False])
def test_the_projections_of_self_attention(bias):
    """For samples of one position the gradient is one product, whose moments follow from it."""
    model = built(lambda: TorchAttention(bias=bias))
    x = random(7, 1, 4)
    found = moments_of(model, x[:3], x[3:])
    assert not found.squares
    assert {w for w in found.outputs if w in found.biases} == (
        {"attention.in_proj_weight", "attention.out_proj.weight", "head.weight"}
        if bias
        else {"head.weight"}
    )
    rows = by_loop(model, x)
    for name in ("attention.in_proj_weight", "attention.out_proj.weight"):
        gradients = rows[:, columns_of(model, name)].view(len(rows), -1, 4)
        a = x[:, 0] if "in_proj" in name else _attended(model, x)
        of_row = a.repeat_interleave(3, 0)  # one row for each of three outputs
        delta = (gradients @ of_row.unsqueeze(2))[..., 0] / of_row.square().sum(1, keepdim=True)
        torch.testing.assert_close(found.outputs[name], delta.T @ delta, **CLOSE)
        a = with_one(a) if bias else a
        torch.testing.assert_close(found.inputs[name], a.T @ a / len(a), **CLOSE)


def _attended(model, x):
    """Of one position: its values."""
    attention = model.attention
    bias = 0 if attention.in_proj_bias is None else attention.in_proj_bias[8:]
    return (x[:, 0] @ attention.in_proj_weight[8:].T + bias).detach()


def test_cross_attention_has_the_exact_diagonal_of_its_inputs_weight():
    model = built(lambda: TorchAttention(crossed=True))
    x = random(7, 5, 4)
    found, rows = moments_of(model, x), by_loop(model, x)
    assert {*found.squares} == {"attention.in_proj_weight", "attention.in_proj_bias"}
    for name, square in found.squares.items():
        expected = rows[:, columns_of(model, name)].square().sum(0)
        torch.testing.assert_close(square.flatten(), expected, **CLOSE)


def test_attention_among_its_own_outputs():
    """Positions: G is the sum over them of δ δᵀ, with δ by autograd at the projection's bias."""
    model = built(TorchAttention)
    x = random(6, 5, 4)
    found = moments_of(model, x)
    a = with_one(x.flatten(0, 1))
    torch.testing.assert_close(found.inputs["attention.in_proj_weight"], a.T @ a / len(a), **CLOSE)
    weight, bias = model.attention.in_proj_weight, model.attention.in_proj_bias
    expected = torch.zeros(12, 12, dtype=torch.float64)
    projected = (x @ weight.T + bias).detach().requires_grad_()
    q, k, v = (part.unflatten(2, (2, 2)).transpose(1, 2) for part in projected.chunk(3, 2))
    mixed = torch.softmax(q @ k.mT / 2**0.5, -1) @ v
    outputs = model.head(model.attention.out_proj(mixed.transpose(1, 2).flatten(2))).mean(1)
    torch.testing.assert_close(outputs, model(x))
    for column in outputs.sum(0):
        (delta,) = torch.autograd.grad(column, projected, retain_graph=True)
        delta = delta.flatten(0, 1)
        expected += delta.T @ delta
    torch.testing.assert_close(found.outputs["attention.in_proj_weight"], expected, **CLOSE)
