"""Forecasts of networks whose layers cannot all be differentiated in the same way."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrizations

from forgetless import ConfigError
from forgetless.theory import TangentModel, linearised, linearised_forecast
from forgetless.theory.linearised import copied, plain_kernels


class Network(nn.Module):
    """One layer, and a linear one on the mean over the sequence of what it returns."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 3)

    def forward(self, x):
        found = (
            self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        )
        found = (found[0] if isinstance(found, tuple) else found).tanh()
        return self.head(found.mean(1) if found.dim() == 3 else found)


class Cube(torch.autograd.Function):
    """x³, without a forward derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class OnceCube(Cube):
    """The same, without a second one either."""

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class Cubes(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.linspace(0.5, 1, 8))

    def forward(self, x):
        return self.function.apply(x * self.scale)


def old_style(norm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return norm(nn.Linear(8, 6))


def sequences():
    return torch.randn(6, 5, 8)


def vectors():
    return torch.randn(6, 8)


def tokens():
    return torch.randint(10, (6, 4))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# Name → the layer, the width of what it returns, the inputs.
CASES = {
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), 8, sequences),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        8,
        sequences,
    ),
    "transformer": (encoder, 8, sequences),
    "LSTM": (lambda: nn.LSTM(8, 5, batch_first=True), 5, sequences),
    "GRU": (lambda: nn.GRU(8, 5, batch_first=True), 5, sequences),
    "bag, mean": (lambda: nn.EmbeddingBag(10, 5, mode="mean"), 5, tokens),
    "bag, max": (lambda: nn.EmbeddingBag(10, 5, mode="max"), 5, tokens),
    "sparse bag": (lambda: nn.EmbeddingBag(10, 5, mode="sum", sparse=True), 5, tokens),
    "sparse embedding": (lambda: nn.Embedding(10, 5, sparse=True), 5, tokens),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 6)), 6, vectors),
    "weight norm, old": (lambda: old_style(nn.utils.weight_norm), 6, vectors),
    "spectral norm, old": (lambda: old_style(nn.utils.spectral_norm), 6, vectors),
    "no forward derivative": (lambda: Cubes(Cube), 8, vectors),
    "no second derivative": (lambda: Cubes(OnceCube), 8, vectors),
}


def network(name: str, dtype: torch.dtype = torch.float64):
    """A network and two tasks for it."""
    make, width, inputs = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Network(make(), width).to(dtype)
        tasks = [(inputs(), torch.randint(3, (6,))) for _ in range(2)]
    return model, [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in tasks]


@pytest.mark.parametrize("name", CASES)
def test_outputs_move_as_finite_differences_say(name):
    model, ((x, _), _) = network(name)
    tangent = TangentModel(copied(model), chunk=4)
    change = torch.randn(tangent.size, generator=torch.Generator().manual_seed(1)).double()
    step = 1e-6 * change
    expected = (tangent.outputs(x, step) - tangent.outputs(x, -step)) / 2e-6
    torch.testing.assert_close(tangent.push(x, change), expected, atol=1e-7, rtol=1e-6)
    moved = tangent.moved(step)
    torch.testing.assert_close(moved.push(x, change), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_network_is_forecast(name, dtype):
    model, (source, target) = network(name, dtype)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    result = linearised_forecast(
        model, source, target, lr=1e-3, epochs=2, batch_size=3, components=2
    )
    assert result.trust > 0.9
    assert result.change.abs().max() > 0
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


@pytest.mark.parametrize("name", CASES)
def test_all_ways_agree(name):
    """Those that the layers allow, with each other."""
    model, ((x, _), _) = network(name)
    tangent = TangentModel(copied(model))
    change = torch.randn(tangent.size, generator=torch.Generator().manual_seed(1)).double()
    found = []
    for way in linearised._WAYS:
        with contextlib.suppress(RuntimeError):
            found.append(way(tangent, x, change))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_a_way_that_fails_is_not_tried_again(monkeypatch):
    calls = []

    def counted(way):
        def call(*args):
            calls.append(way.__name__)
            return way(*args)

        return call

    monkeypatch.setattr(linearised, "_WAYS", [counted(w) for w in linearised._WAYS])
    model, ((x, _), _) = network("weight norm")
    tangent = TangentModel(copied(model), chunk=2)
    tangent.push(x, torch.ones_like(tangent.theta))
    assert calls == ["_forward", "_plainly_forward", *["_twice_in_reverse"] * 3]
    tangent.moved(torch.zeros_like(tangent.theta)).push(x[:2], torch.ones_like(tangent.theta))
    assert calls[5:] == ["_twice_in_reverse"]


def test_fast_kernels_are_back_afterwards():
    def flags():
        backends = torch.backends
        attention = backends.cuda.math_sdp_enabled(), backends.cuda.flash_sdp_enabled()
        fast = backends.mha.get_fastpath_enabled(), backends.mkldnn.enabled
        return (*attention, *fast, backends.cudnn.enabled)

    before = flags()
    with contextlib.suppress(ZeroDivisionError), plain_kernels():
        assert flags() != before
        raise ZeroDivisionError
    assert flags() == before
    for fast in (True, False):
        torch.backends.mha.set_fastpath_enabled(fast)
        try:
            with plain_kernels():
                assert not torch.backends.mha.get_fastpath_enabled()
            assert torch.backends.mha.get_fastpath_enabled() is fast
        finally:
            torch.backends.mha.set_fastpath_enabled(before[2])


def test_a_network_that_cannot_be_differentiated_says_why(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no derivative of frobnicate\nat line 3")

    monkeypatch.setattr(linearised, "tangent_features", refuse)
    model, tasks = network("bag, mean")
    with pytest.raises(
        ConfigError, match=r"cannot be differentiated: no derivative of frobnicate$"
    ):
        linearised_forecast(model, *tasks, lr=0.1)


def test_a_network_that_cannot_be_copied_says_why():
    model, tasks = network("GRU")
    model.stream = (i for i in range(3))
    with pytest.raises(ConfigError, match=r"copy\.deepcopy can copy: cannot p"):
        linearised_forecast(model, *tasks, lr=0.1)
