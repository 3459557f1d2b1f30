"""Every rule, and every way around the rules, against a loop of autograd calls in float64."""

from functools import partial

import pytest
import torch
from torch import nn

from forgetless.tangent import tangent_features
from forgetless.training.models import MLP, LeNet

from . import networks as net
from .reference import assert_is, built, by_loop, integers, random

N = 6
# torch says so of even kernels; the model is the one that it warns.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same")


# name → network, shape of one input (None: five tokens), {parameter: rule} (the rest follow the
# layer: "linear" and "bias").
LINEAR = {
    "mlp": (lambda: MLP(6, 5, 4), (6,), {}),
    "sequence": (net.sequence_linear, (5, 2), {}),
    "flattened": (net.flattened_linear, (5, 2), {}),
    "positions first": (
        net.positions_first,
        (5, 4),
        {"two.layer.weight": "vmap", "two.layer.bias": "vmap"},
    ),
    "recurrence": (net.recurrence, (4,), {}),
    "tied": (net.tied_linear, (5,), {}),
    "tied by hand": (net.tied_by_hand, (5,), {"layer.weight": "vmap"}),
    "hardly used again": (net.hardly_used_again, (5,), {"layer.weight": "vmap"}),
    "in place": (net.in_place, (6,), {"2.weight": "norm", "2.bias": "norm"}),
}
CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(2, 3, 3), (2, 7), 15),
    "1d stride padding": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=2), (2, 7), 15),
    "1d dilation": (lambda: nn.Conv1d(2, 3, 3, dilation=3), (2, 8), 6),
    "1d groups": (lambda: nn.Conv1d(4, 6, 2, groups=2), (4, 5), 24),
    "1d same": (lambda: nn.Conv1d(2, 3, 4, padding="same"), (2, 6), 18),
    "1d valid": (lambda: nn.Conv1d(2, 3, 4, padding="valid"), (2, 6), 9),
    "1d circular": (
        lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), (2, 5), 21,
    ),
    "2d": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 5), 27),
    "2d uneven": (
        lambda: nn.Conv2d(2, 3, (2, 3), stride=(1, 2), padding=(0, 1), dilation=(2, 1)),
        (2, 5, 4), 18,
    ),
    "2d depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (4, 3, 3), 36),
    "2d grouped stride": (lambda: nn.Conv2d(4, 2, 2, stride=2, groups=2), (4, 4, 4), 8),
    "2d reflect": (
        lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (2, 4, 4), 32,
    ),
    "2d replicate same": (
        lambda: nn.Conv2d(2, 2, (3, 2), padding="same", padding_mode="replicate"), (2, 3, 4), 24,
    ),
    "2d one by one": (lambda: nn.Conv2d(3, 2, 1), (3, 3, 3), 18),
    "3d": (lambda: nn.Conv3d(2, 2, 2, stride=2, padding=1), (2, 3, 3, 3), 16),
    "3d groups dilation": (
        lambda: nn.Conv3d(2, 4, 2, groups=2, dilation=2), (2, 3, 3, 4), 8,
    ),
}  # fmt: skip
# the norm, the shape of one input, and how many numbers it has
NORMS = {
    "layer": (lambda: nn.LayerNorm(5), (5,), 5),
    "layer, two dimensions": (lambda: nn.LayerNorm((4, 5)), (4, 5), 20),
    "layer, two dimensions, positions": (lambda: nn.LayerNorm((2, 3)), (4, 2, 3), 24),
    "layer, positions": (lambda: nn.LayerNorm(5), (4, 5), 20),
    "layer, no bias": (lambda: nn.LayerNorm(5, bias=False), (4, 5), 20),
    "group": (lambda: nn.GroupNorm(2, 4), (4, 3, 3), 36),
    "group, no space": (lambda: nn.GroupNorm(2, 4), (4,), 4),
    "batch 1d": (lambda: nn.BatchNorm1d(5), (5,), 5),
    "batch 1d, positions": (lambda: nn.BatchNorm1d(2), (2, 4), 8),
    "batch 2d": (lambda: nn.BatchNorm2d(2), (2, 3, 3), 18),
    "batch 3d": (lambda: nn.BatchNorm3d(2), (2, 2, 2, 2), 16),
}
KINDS = ("weight", "bias")
PROJECTIONS = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
ATTENTION = {f"attention.{name}": "vmap" for name in PROJECTIONS}
ENCODER = {
    **{f"layer.self_attn.{name}": "vmap" for name in PROJECTIONS},
    **{f"layer.norm{i}.{kind}": "norm" for i in (1, 2) for kind in KINDS},
}
TRANSFORMER = {
    "tokens.weight": "embedding+linear",
    "places.weight": "vmap",
    **{f"norm{i}.{kind}": "norm" for i in (1, 2, 3) for kind in KINDS},
}
# Whether vmap can run a recurrent layer depends on the backend.
LSTM = {f"cell.{kind}_l0": "rows" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
WHOLE = {
    "embedding": (net.embedding, None, {"tokens.weight": "embedding"}),
    "embedding padding": (
        partial(net.embedding, padding_idx=3), None, {"tokens.weight": "embedding"},
    ),
    "embedding sparse": (
        partial(net.embedding, sparse=True), None, {"tokens.weight": "embedding"},
    ),
    "embedding max norm": (
        partial(net.embedding, max_norm=1.0), None, {"tokens.weight": "loop"},
    ),
    "tied embedding": (net.tied_embedding, None, {"tokens.weight": "embedding+linear"}),
    "transformer": (net.transformer, None, TRANSFORMER),
    "encoder layer": (partial(net.encoder_layer, True), (4, net.D), ENCODER),
    # As many positions as samples: nothing in the shapes tells one from the other.
    "encoder layer, positions first": (partial(net.encoder_layer, False), (N, net.D), ENCODER),
    "attention": (partial(net.multihead, True), (4, net.D), ATTENTION),
    "attention, positions first": (partial(net.multihead, False), (N, net.D), ATTENTION),
    "residual": (
        net.residual, (2, 4, 4),
        {"conv1.weight": "conv", "conv2.weight": "conv",
         **{f"norm{i}.{kind}": "norm" for i in (1, 2) for kind in KINDS}},
    ),
    "lenet": (
        lambda: LeNet((1, 8, 8), hidden=7, outputs=4), (1, 8, 8),
        {"convolutions.0.weight": "conv", "convolutions.4.weight": "conv",
         **{f"{layer}.{kind}": "norm" for layer in ("convolutions.1", "convolutions.5", "body.1")
            for kind in KINDS}},
    ),
    "frames": (
        net.frames, (3, 2, 3, 3),
        {"conv.weight": "conv", "norm.weight": "norm", "norm.bias": "norm"},
    ),
    **{
        f"own norms, {where}": (
            partial(net.own_norms, where == "samples first"), None,
            {"tokens.weight": "embedding", "places.weight": "embedding", "norm.weight": "layer"},
        )
        for where in ("samples first", "positions first")
    },
    "bare": (net.Bare, (4,), {"matrix": "layer", "scale": "layer", "idle": "unused"}),
    "lstm": (partial(net.recurrent, nn.LSTM), (4, 3), LSTM),
    "gru": (partial(net.recurrent, nn.GRU), (4, 3), LSTM),
    "branch": (net.Branching, (4,), {"weight": "loop"}),
    "subclass": (lambda: net.Doubled(4, 3), (4,), {"weight": "layer", "bias": "layer"}),
}  # fmt: skip

CASES = {
    **LINEAR,
    **{
        f"conv {name}": (
            partial(lambda m, a: net.convolutional(m(), a), make, after),
            shape,
            {"0.weight": "conv"},
        )
        for name, (make, shape, after) in CONVOLUTIONS.items()
    },
    **{
        f"norm {name}": (
            partial(lambda m, a: net.convolutional(m(), a), make, after),
            shape,
            {f"0.{kind}": "norm" for kind, _ in make().named_parameters()},
        )
        for name, (make, shape, after) in NORMS.items()
    },
    **WHOLE,
}  # fmt: skip


def inputs(shape, n=N, seed=0):
    # Few tokens, so that they repeat within a sample.
    return integers(4, n, 5, seed=seed) if shape is None else random(n, *shape, seed=seed)


def rules_of(phi):
    rows = {"vmap": "rows", "loop": "rows"}
    return {n: rows.get(r, r) if "cell" in n else r for n, r in phi.rules.items()}


def follow_the_layer(model, exceptions):
    names = [name for name, _ in model.named_parameters()]
    return {n: "bias" if n.endswith("bias") else "linear" for n in names} | exceptions


@pytest.mark.parametrize("name", CASES)
def test_everything_agrees_with_a_loop_of_autograd_calls(name):
    make, shape, rules = CASES[name]
    model = built(make)
    x, y = inputs(shape), integers(3, N, seed=1)
    phi = tangent_features(model, x, y)
    # Which rule holds which parameter is part of the promise: none falls back unnoticed.
    assert rules_of(phi) == follow_the_layer(model, rules)
    assert_is(phi, by_loop(model, x, y))


@pytest.mark.parametrize(
    "name", ["mlp", "conv 2d", "transformer", "bare", "lstm", "tied embedding"]
)
def test_without_labels_every_output_has_a_row(name):
    make, shape, rules = CASES[name]
    model, x = built(make), inputs(shape, n=4)
    phi = tangent_features(model, x, chunk=3)
    assert rules_of(phi) == follow_the_layer(model, rules)
    assert_is(phi, by_loop(model, x))


@pytest.mark.parametrize("chunk", [1, 2, 4, N, 100])
@pytest.mark.parametrize(
    "name", ["mlp", "conv 2d uneven", "embedding", "transformer", "attention, positions first"]
)
def test_the_size_of_the_chunks_does_not_matter(name, chunk):
    make, shape, _ = CASES[name]
    model, x, y = built(make), inputs(shape), integers(3, N, seed=1)
    assert_is(tangent_features(model, x, y, chunk=chunk), by_loop(model, x, y))


@pytest.mark.parametrize("name", ["mlp", "conv 2d groups", "tied embedding", "transformer", "lstm"])
def test_cross_gram_between_weights_and_between_inputs(name):
    make, shape, _ = CASES.get(name, CASES["conv 2d grouped stride"])
    one, two = built(make, seed=0), built(make, seed=1)
    x1, x2 = inputs(shape, seed=0), inputs(shape, n=4, seed=1)
    y1, y2 = integers(3, N, seed=1), integers(3, 4, seed=2)
    a, b = tangent_features(one, x1, y1, chunk=4), tangent_features(two, x2, y2, chunk=3)
    c = tangent_features(one, x2)
    dense = by_loop(one, x1, y1)
    for other, matrix in ((b, by_loop(two, x2, y2)), (c, by_loop(one, x2))):
        expected = dense @ matrix.T
        torch.testing.assert_close(a.cross_gram(other), expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(other.cross_gram(a), expected.T, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("outputs", [(), (1,)])
def test_scalar_outputs(outputs):
    model = built(
        lambda: net.Calls(
            lambda m, x: m.b(torch.tanh(m.a(x))).view(len(x), *outputs),
            a=nn.Linear(4, 5),
            b=nn.Linear(5, 1),
        )
    )
    x = random(N, 4)
    assert_is(tangent_features(model, x), by_loop(model, x))


class Hidden(nn.Module):
    """A weight with a second use that only matters for a sample close to zero."""

    def __init__(self, use) -> None:
        super().__init__()
        self.first, self.last, self.use = nn.Linear(8, 8), nn.Linear(8, 3), use

    def forward(self, x):
        size = x.norm(dim=1, keepdim=True)
        again = self.use(x, self.first.weight) * torch.exp(-100 * size)
        return self.last((self.first(x) * size**2).tanh() + again)


USES = {
    "plain": lambda x, w: x @ w.T,
    "vmap": lambda x, w: torch.func.vmap(lambda row: x @ row)(w).T,
    "jvp": lambda x, w: torch.func.jvp(lambda v: x @ v.T, (w,), (w,))[1],
    "grad": lambda x, w: torch.func.grad(lambda v: (v @ w.T).square().sum())(x),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_outside_of_the_layer_is_seen_wherever_it_is(use):
    """In float32, where the sum over all samples does not show it."""
    torch.manual_seed(0)
    model, x = Hidden(USES[use]), torch.randn(16, 8)
    x[0] *= 1e-3
    phi = tangent_features(model, x, torch.zeros(16, dtype=torch.long))
    assert phi.rules["first.weight"] == "vmap"
    found, expected = phi.dense(), by_loop(model, x, torch.zeros(16, dtype=torch.long))
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) < 1e-5


def test_what_a_users_hook_does_is_not_the_layers_run():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(9, 8)
    model[0].register_forward_hook(lambda m, args, out: out + 1e-3 * (args[0] @ m.weight.T).sin())
    y = torch.zeros(9, dtype=torch.long)
    phi = tangent_features(model, x, y)
    assert phi.rules["0.weight"] == "vmap"
    torch.testing.assert_close(phi.dense(), by_loop(model, x, y), atol=1e-6, rtol=1e-5)
