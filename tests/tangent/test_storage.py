"""Features that are held: the same operator without the network, and through a file."""

import json
import sys

import pytest
import torch
from torch import nn

from forgetless import ConfigError
from forgetless.subspace.dense import _merged
from forgetless.tangent import (
    bytes_by_parameter,
    concatenated,
    empty_features,
    from_tensors,
    stored,
    stored_bytes,
    tangent_features,
    to_tensors,
)
from forgetless.training.models import MLP, LeNet

from . import networks as net
from .reference import assert_is, built, by_loop, integers, random

room = sys.modules["forgetless.tangent.storage"]  # the function has taken its name

NETWORKS = {
    "mlp": (lambda: MLP(6, 5, 4), lambda n: random(n, 6), 4),
    "lenet": (lambda: LeNet((1, 8, 8), hidden=7, outputs=4), lambda n: random(n, 1, 8, 8), 4),
    "tied embedding": (net.tied_embedding, lambda n: integers(net.V, n, 4), net.V),
    "transformer": (net.transformer, lambda n: integers(net.V, n, 5), net.V),
    "frames": (net.frames, lambda n: random(n, 3, 2, 3, 3), 3),
    "idle parameters": (net.Bare, lambda n: random(n, 4), 3),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


@pytest.fixture(params=[room._AS_ROWS, 0], ids=["lighter", "factors"], autouse=True)
def _lighter_or_all_factors(request, monkeypatch):
    """Networks as small as these have few gradients that are larger than their factors."""
    monkeypatch.setattr(room, "_AS_ROWS", request.param)


def case(name: str, n: int = 8):
    make, inputs, classes = NETWORKS[name]
    return built(make), inputs(n), integers(classes, n, seed=3)


@every_network
def test_held_is_the_same_operator_without_the_network(name):
    model, x, y = case(name)
    dense = by_loop(model, x, y)
    phi = stored(tangent_features(model, x, y, chunk=3))
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    assert_is(phi, dense)
    assert len(phi.source) == 1  # chunks of one shape are laid end to end


@every_network
def test_some_rows_and_rows_of_several(name):
    model, x, y = case(name)
    dense = by_loop(model, x, y)
    phi = tangent_features(model, x, y, chunk=3)
    some = stored(phi, torch.tensor([0, 3, 4, 7]))
    assert_is(some, dense[[0, 3, 4, 7]])
    assert_is(stored(some, torch.tensor([1, 3])), dense[[3, 7]])
    both = concatenated(some, stored(phi, torch.tensor([1])), empty_features(phi))
    assert_is(both, dense[[0, 3, 4, 7, 1]])
    assert len(empty_features(phi)) == 0
    assert empty_features(phi).gram().shape == (0, 0)


@every_network
def test_through_tensors_with_names(name):
    model, x, y = case(name)
    phi = stored(tangent_features(model, x, y, chunk=3))
    tensors = to_tensors(phi)
    assert len({t.data_ptr() for t in tensors.values() if t.numel()}) == len(
        [t for t in tensors.values() if t.numel()]
    )
    again = from_tensors({n: t.clone() for n, t in tensors.items()}, random(1))
    assert_is(again, by_loop(model, x, y))
    assert stored_bytes(again) == stored_bytes(phi)


def test_several_scalars_a_sample_come_one_after_the_other():
    model, x = built(lambda: MLP(6, 5, 4)), random(5, 6)
    phi = stored(tangent_features(model, x))
    order = [i * 4 + c for c in range(4) for i in range(5)]
    assert_is(phi, by_loop(model, x)[order])


def test_a_sample_costs_what_goes_in_and_out_of_a_layer():
    model = built(lambda: MLP(784, 100, 10)).float()
    x, y = random(20, 784).float(), integers(10, 20)
    numbers = (784 + 100) + (100 + 100) + (100 + 10)
    phi = tangent_features(model, x, y)
    for one in (
        stored(phi),
        stored(phi, torch.arange(20)),
        concatenated(stored(phi), empty_features(phi)),
    ):
        assert stored_bytes(one) == 4 * 20 * numbers
        assert sum(bytes_by_parameter(one).values()) == 4 * 20 * numbers
    row = 4 * sum(p.numel() for p in model.parameters())
    assert row / (4 * numbers) > 50


def test_only_held_features_have_tensors():
    phi = tangent_features(nn.Linear(2, 2), torch.ones(3, 2))
    with pytest.raises(ConfigError, match="only stored features can be saved"):
        to_tensors(phi)


def changed(tensors, **changes):
    layout = json.loads(bytes(tensors["layout"].tolist())) | changes
    text = torch.tensor(list(json.dumps(layout).encode()), dtype=torch.uint8)
    return {**tensors, "layout": text}


DAMAGE = {
    "no layout": lambda t: {n: v for n, v in t.items() if n != "layout"},
    "no text": lambda t: {**t, "layout": torch.zeros(3, dtype=torch.uint8)},
    "a tensor is missing": lambda t: {n: v for n, v in t.items() if n != "0"},
    "a tensor is short": lambda t: {**t, "0": t["0"][:-1]},
    "other sizes": lambda t: changed(t, sizes=[1] * 6),
    "another name": lambda t: changed(t, names=["a", "b", "c", "d", "e", "f"]),
    "no parts": lambda t: changed(t, parts=[3]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_fit_together_is_refused(damage):
    model, x, y = case("mlp")
    tensors = to_tensors(stored(tangent_features(model, x, y)))
    with pytest.raises(ConfigError, match="stored features do not fit together"):
        from_tensors(DAMAGE[damage](tensors), random(1))


def test_tokens_outside_of_the_vocabulary_are_refused(monkeypatch):
    monkeypatch.setattr(room, "_AS_ROWS", 0)
    model, x, y = case("tied embedding")
    tensors = to_tensors(stored(tangent_features(model, x, y)))
    whole = [n for n, t in tensors.items() if t.dtype == torch.int64]
    assert whole
    with pytest.raises(ConfigError, match="tokens outside of"):
        from_tensors({**tensors, whole[0]: tensors[whole[0]] + 100}, random(1))


def test_scalars_of_a_sample_are_laid_end_to_end():
    model = built(lambda: nn.Linear(4, 3))
    phi = tangent_features(model, random(6, 4), chunk=4)
    whole = _merged(phi)
    assert len(whole.source) == 1
    order = [row for start, stop in ((0, 4), (4, 6)) for k in range(3)
             for row in range(start * 3 + k, stop * 3, 3)]  # fmt: skip
    torch.testing.assert_close(whole.dense(), phi.dense()[order])
    assert _merged(whole) is whole


def test_gradients_of_many_positions_are_kept_as_rows_where_factors_save_little(monkeypatch):
    monkeypatch.setattr(room, "_AS_ROWS", 2)
    model = built(lambda: LeNet((3, 32, 32), hidden=9, outputs=4)).float()
    phi = stored(tangent_features(model, random(4, 3, 32, 32).float(), integers(4, 4)))
    kinds = {name: kind for name, kind in phi.rules.items() if name.endswith("weight")}
    expected = {"convolutions.0.weight": "rows", "convolutions.4.weight": "rows"}
    assert {name: kinds[name] for name in expected} == expected
    assert kinds["body.0.weight"] == "outer"
    sizes = bytes_by_parameter(phi)
    assert sizes["convolutions.0.weight"] == 4 * 4 * model.convolutions[0].weight.numel()
