"""The operator as a whole: what is chosen, what is captured when, what is kept in memory."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from forgetless.tangent import Batch, features_of, tangent_features
from forgetless.tangent import features as features_module
from forgetless.training.models import MLP, LeNet

from . import networks as net
from .reference import CLOSE, assert_is, built, by_loop, integers, random


@pytest.fixture
def mlp():
    return built(lambda: MLP(6, 5, 4)), random(9, 6), integers(4, 9)


def names_of(model):
    return [name for name, _ in model.named_parameters()]


# What is asked for → the names that are meant, in order.
BODY = ["body.1.weight", "body.1.bias", "body.3.weight", "body.3.bias"]
CHOICES = {
    "a submodule": (lambda m: m.body, BODY),
    "a name": (lambda m: "head.bias", ["head.bias"]),
    "a prefix": (lambda m: "body.3", BODY[2:]),
    "names, in their own order": (lambda m: ["head.bias", BODY[2]], ["head.bias", BODY[2]]),
    "twice the same": (lambda m: ["head", "head.bias"], ["head.weight", "head.bias"]),
    "parameters": (lambda m: iter([m.head.weight, m.body[1].bias]), ["head.weight", BODY[1]]),
    "one parameter": (lambda m: m.head.weight, ["head.weight"]),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_of_parameters(mlp, choice):
    model, x, y = mlp
    choose, names = CHOICES[choice]
    phi = tangent_features(model, x, y, params=choose(model))
    assert list(phi.rules) == names
    assert set(phi.rules.values()) <= {"linear", "bias"}
    assert_is(phi, by_loop(model, x, y, [dict(model.named_parameters())[n] for n in names]))


def test_frozen_parameters_are_left_out_unless_named(mlp):
    model, x, y = mlp
    model.body.requires_grad_(False)
    assert list(tangent_features(model, x, y).rules) == ["head.weight", "head.bias"]
    named = tangent_features(model, x, y, params="body.1")
    model.body.requires_grad_(True)
    assert_is(named, by_loop(model, x, y, list(model.body[1].parameters())))


def test_the_second_name_of_a_tied_parameter():
    model, x, y = built(net.tied_embedding), integers(net.V, 5, 4), integers(net.V, 5)
    phi = tangent_features(model, x, y, params="out.weight")
    assert phi.rules == {"tokens.weight": "embedding+linear"}
    assert_is(phi, by_loop(model, x, y, [model.tokens.weight]))


def test_several_inputs_by_position_and_by_name():
    def run(m, first, second):
        return m.b(torch.tanh(m.a(first)) + second)

    model = built(lambda: net.Calls(run, a=nn.Linear(3, 5), b=nn.Linear(5, 4)))
    first, second, y = random(7, 3), random(7, 5, seed=1), integers(4, 7)
    by_position = tangent_features(model, (first, second), y, chunk=3)
    assert_is(by_position, by_loop(model, (first, second), y))
    by_name = {"second": second, "first": first}
    assert_is(tangent_features(model, by_name, y, chunk=3), by_loop(model, by_name, y))


def test_an_input_given_to_a_layer_by_name():
    model = built(lambda: net.Calls(lambda m, x: m.layer(input=x), layer=nn.Linear(3, 2)))
    x, y = random(5, 3), integers(2, 5)
    phi = tangent_features(model, x, y)
    assert phi.rules == {"layer.weight": "linear", "layer.bias": "bias"}
    assert_is(phi, by_loop(model, x, y))


def test_later_training_changes_nothing():
    model = built(lambda: LeNet((1, 8, 8), hidden=7, outputs=4))
    x, y = random(7, 1, 8, 8), integers(4, 7)
    phi, dense = tangent_features(model, x, y, chunk=2), by_loop(model, x, y)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x).square().sum().backward()
    optimizer.step()
    assert not torch.allclose(by_loop(model.eval(), x, y), dense)
    model.train()
    assert_is(phi, dense)
    assert all(module.training for module in model.modules())


def test_the_model_is_left_as_it_was(mlp):
    model, x, y = mlp
    before = {n: v.clone() for n, v in model.state_dict().items()}
    model.train()
    tangent_features(model, x, y).gram()
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off(mlp, mode):
    model, x, y = mlp
    dense = by_loop(model, x, y)
    with mode():
        phi = tangent_features(model, x + 0, y)
        torch.testing.assert_close(phi.gram(), dense @ dense.T, **CLOSE)
        assert not phi.dense().requires_grad


def test_a_budget_of_nothing_captures_again_and_gives_the_same(mlp, monkeypatch):
    model, x, y = mlp
    monkeypatch.setattr(features_module, "_BUDGET", 0)
    phi = tangent_features(model, x, y, chunk=2)
    assert_is(phi, by_loop(model, x, y))
    assert phi.source.kept == {}


def test_chunks_are_captured_once_and_within_the_budget(mlp, monkeypatch):
    model, x, y = mlp
    captured = []
    capture = features_module.capture
    monkeypatch.setattr(
        features_module, "capture", lambda *args: captured.append(args[0].n) or capture(*args)
    )
    phi = tangent_features(model, x, y, chunk=4)
    phi.gram(), phi.dense(), phi @ random(phi.shape[1])
    assert captured == [4, 4, 1]
    one = phi.source.kept_bytes // 9
    monkeypatch.setattr(features_module, "_BUDGET", 5 * one)
    some = tangent_features(model, x, y, chunk=4)
    some.gram()
    assert list(some.source.kept) == [0, 2]


def test_the_default_chunk_follows_the_memory_that_a_sample_takes(monkeypatch):
    x, y = random(40, 4), integers(3, 40)
    small = tangent_features(built(lambda: nn.Linear(4, 3)), x, y)
    assert small.source.parts[0].n == 40 or len(small.source) == 1
    # Rows of a layer without a rule are as wide as the layer.
    monkeypatch.setattr(features_module, "_BUDGET", 8 * 5 * 15 * 8)
    wide = tangent_features(built(lambda: net.Doubled(4, 3)), x, y)
    assert wide.source.parts[0].n == 5
    assert_is(wide, by_loop(built(lambda: net.Doubled(4, 3)), x, y))


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_share_of_variance_takes_the_fewest_directions_that_reach_it(share):
    model, x, y = built(lambda: MLP(6, 5, 4)), random(12, 6), integers(4, 12)
    energy = torch.linalg.svdvals(by_loop(model, x, y)).square()
    explained = energy.cumsum(0) / energy.sum()
    values, _ = tangent_features(model, x, y).top(share)
    kept = len(values)
    assert explained[kept - 1] >= share
    assert kept == 1 or explained[kept - 2] < share


def test_no_more_directions_than_the_rank(mlp):
    model, x, y = mlp
    values, directions = tangent_features(model, torch.cat([x, x]), torch.cat([y, y])).top(18)
    assert len(values) == len(x)
    gram = directions @ directions.T
    torch.testing.assert_close(gram, torch.eye(len(gram)).double(), atol=1e-10, rtol=0)


def test_float32_features_have_a_float64_gram_matrix_right_to_1e_6():
    model = built(lambda: LeNet((1, 8, 8), hidden=20, outputs=4))
    x, y = random(60, 1, 8, 8), integers(4, 60)
    exact = tangent_features(model, x, y).gram()
    phi = tangent_features(model.float(), x.float(), y)
    gram = phi.gram()
    assert gram.dtype == torch.float64
    assert {phi.dense().dtype, phi.top(3)[1].dtype, phi.squared_sum().dtype} == {torch.float32}
    assert (phi @ random(phi.shape[1])).dtype == torch.float32
    lengths = exact.diagonal().sqrt()
    assert ((gram - exact).abs() / lengths / lengths.unsqueeze(1)).max() < 1e-6
    directions = phi.top(40)[1].double()
    assert (directions @ directions.T - torch.eye(len(directions))).abs().max() < 1e-5


def test_bfloat16_runs():
    model = built(lambda: MLP(6, 5, 4)).bfloat16()
    x, y = random(9, 6).bfloat16(), integers(4, 9)
    phi = tangent_features(model, x, y)
    assert phi.dense().dtype == torch.bfloat16
    dense = by_loop(model, x, y).double()
    assert (phi.gram() - dense @ dense.T).norm() < 0.05 * (dense @ dense.T).norm()
    assert set(phi.rules.values()) == {"linear", "bias"}


def test_what_a_branch_leaves_out_has_a_gradient_of_zero():
    """A parameter without use in the first chunk, used later: its rule is still found."""

    def run(m, x):
        return m.always(x) + (m.rarely(x) if bool((x > 0).all()) else 0)

    model = built(lambda: net.Calls(run, always=nn.Linear(3, 2), rarely=nn.Linear(3, 2)))
    x = random(8, 3).abs()
    x[:4] *= -1
    y = integers(2, 8)
    phi = tangent_features(model, x, y, chunk=4)
    assert phi.rules["rarely.weight"] == "unused"
    assert_is(phi, by_loop(model, x, y))
    assert phi.rules["rarely.weight"] == "linear"


def test_a_scalar_function_of_ones_own_with_functional_values(mlp):
    model, x, y = mlp
    names = ["head.bias", "body.3.weight"]
    values = {n: 2 * v.detach() for n, v in model.state_dict().items()}

    def loss(outputs, labels):
        return nn.functional.cross_entropy(outputs, labels, reduction="none")

    phi = features_of(model, values, [Batch((x,), {}, (y,))], loss, names=names, chunk=4)
    model.load_state_dict(values)
    rows = []
    parameters = dict(model.named_parameters())
    for i in range(len(x)):
        output = loss(model(x[i : i + 1]), y[i : i + 1])[0]
        grads = torch.autograd.grad(output, [parameters[n] for n in names])
        rows.append(torch.cat([g.flatten() for g in grads]))
    assert phi.rules == {"head.bias": "bias", "body.3.weight": "linear"}
    assert_is(phi, torch.stack(rows))


def test_tied_weights_in_a_network_of_functional_values():
    model, x, y = built(net.tied_linear), random(5, 5), integers(5, 5)
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    true_class = lambda outputs, labels: outputs.gather(1, labels[:, None])[:, 0]  # noqa: E731
    phi = features_of(model, values, [Batch((x,), {}, (y,))], true_class, names=list(values))
    assert set(phi.rules.values()) == {"linear", "bias"}
    assert_is(phi, by_loop(model, x, y))


sizes = st.integers(1, 4)


@given(n=st.integers(1, 7), chunk=st.integers(1, 8), widths=st.lists(sizes, min_size=2, max_size=4),
       positions=st.integers(1, 4), labelled=st.booleans(), seed=st.integers(0, 99))  # fmt: skip
def test_linear_layers_of_any_size(n, chunk, widths, positions, labelled, seed):
    layers = [nn.Linear(a, b, bias=bool(a % 2)) for a, b in pairwise(widths)]

    def run(m, x):
        for layer in m.layers:
            x = torch.tanh(layer(x))
        return x.mean(1)

    model = built(lambda: net.Calls(run, layers=nn.ModuleList(layers)))
    for p in model.parameters():
        p.data = random(*p.shape, seed=seed)
    x = random(n, positions, widths[0], seed=seed)
    y = integers(widths[-1], n, seed=seed) if labelled else None
    phi = tangent_features(model, x, y, chunk=chunk)
    assert set(phi.rules.values()) <= {"linear", "bias"}
    assert_is(phi, by_loop(model, x, y))


@given(n=st.integers(1, 5), kernel=st.integers(1, 3), stride=st.integers(1, 3),
       padding=st.integers(0, 2), dilation=st.integers(1, 2), groups=st.integers(1, 2),
       fan=st.tuples(sizes, sizes), size=st.integers(5, 7), seed=st.integers(0, 99))  # fmt: skip
def test_convolutions_of_any_geometry(
    n, kernel, stride, padding, dilation, groups, fan, size, seed
):
    c_in, c_out = (f * groups for f in fan)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}

    def run(m, x):
        return torch.tanh(m.conv(x)).mean((2, 3))

    model = built(lambda: net.Calls(run, conv=nn.Conv2d(c_in, c_out, kernel, **options)), seed)
    x, y = random(n, c_in, size, size, seed=seed), integers(c_out, n, seed=seed)
    phi = tangent_features(model, x, y)
    assert phi.rules == {"conv.weight": "conv", "conv.bias": "bias"}
    assert_is(phi, by_loop(model, x, y))


@given(n=st.integers(1, 6), length=st.integers(1, 6), tokens=st.integers(2, 5),
       tied=st.booleans(), padding=st.booleans(), seed=st.integers(0, 99))  # fmt: skip
def test_embeddings_of_any_sequence(n, length, tokens, tied, padding, seed):
    def make():
        model = net.Calls(
            lambda m, t: m.out(torch.tanh(m.tokens(t).cumsum(1)).mean(1)),
            tokens=nn.Embedding(tokens, 3, padding_idx=1 if padding else None),
            out=nn.Linear(3, tokens),
        )
        if tied:
            model.out.weight = model.tokens.weight
        return model

    model = built(make, seed)
    t, y = integers(tokens, n, length, seed=seed), integers(tokens, n, seed=seed)
    phi = tangent_features(model, t, y)
    assert phi.rules["tokens.weight"] == ("embedding+linear" if tied else "embedding")
    assert_is(phi, by_loop(model, t, y))


class Autocasting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x).float()


def test_a_model_that_computes_in_lower_precision_has_features_of_its_weights_precision():
    model = built(Autocasting).float()
    x, y = random(9, 6).float(), integers(3, 9)
    phi = tangent_features(model, x, y)
    assert "loop" not in phi.rules.values()
    assert "vmap" not in phi.rules.values()
    expected = by_loop(model, x, y)
    assert phi.dense().dtype == torch.float32
    torch.testing.assert_close(phi.dense(), expected.float(), rtol=0, atol=0.02)
    torch.testing.assert_close(phi.gram(), (expected @ expected.T).double(), rtol=0.02, atol=0.02)
