"""A state that does not fit is refused, and changes nothing."""

import json

import pytest
import torch
from torch import nn, optim

from forgetless import AGEM, EWC, GEM, OGD, PCAOGD, SGD, ConfigError, Guard, Joint
from tests.conftest import Bare

from .problems import mlp, task
from .test_state import METHODS, every_method, learn, started


def header(state):
    return json.loads(bytes(state["header"].tolist()))


def with_header(state, **changes):
    text = json.dumps({**header(state), **changes}).encode()
    return {**state, "header": torch.tensor(list(text), dtype=torch.uint8)}


def without(state, ending):
    return {n: t for n, t in state.items() if not n.endswith(ending)}


def shortened(state, name):
    return {**state, name: state[name][..., :-1].clone()}


DAMAGE = {
    "empty": (lambda s: {}, "state_dict must be what a guard's state_dict"),
    "none": (lambda s: None, "state_dict must be what a guard's state_dict"),
    "of a model": (lambda s: mlp().state_dict(), "state_dict must be what a guard's"),
    "header cut": (lambda s: shortened(s, "header"), "state_dict must be what a guard's"),
    "header a list": (lambda s: {**s, "header": [1]}, "state_dict must be what a guard's"),
    "newer": (lambda s: with_header(s, format=9), "format 9, this version reads 1"),
    "no tasks": (lambda s: with_header(s, tasks=None), "damaged or incomplete"),
    "no storage": (lambda s: with_header(s, storage={}), "damaged or incomplete"),
    "odd storage": (
        lambda s: with_header(s, storage={**header(s)["storage"], "dtype": "float7"}),
        "damaged",
    ),
    "no parameters": (lambda s: with_header(s, parameters=3), "damaged or incomplete"),
    "odd shapes": (
        lambda s: with_header(s, parameters=dict.fromkeys(header(s)["parameters"], 3)),
        "damaged or incomplete",
    ),
    "no generators": (
        lambda s: without(s, "generators"),
        "damaged or incomplete: 'generators' is missing",
    ),
    "generators cut": (lambda s: shortened(s, "generators"), "damaged or incomplete"),
    "generators zero": (lambda s: {**s, "generators": s["generators"] * 0}, "damaged"),
    "memory gone": (
        lambda s: {n: t for n, t in s.items() if not n.startswith("memory.")},
        "damaged: .* is missing, not",
    ),
    "one thing too many": (
        lambda s: {**s, "memory.more": torch.zeros(1)},
        "damaged: more is .*, not no such tensor",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["ogd", "ogd, factored", "a-gem", "ewc", "joint"])
def test_a_damaged_state_changes_nothing(damage, name):
    change, message = DAMAGE[damage]
    model, optimizer, guard = started(name)
    learn(model, optimizer, guard, (0, 1))
    before, stats = guard.state_dict(), guard.stats()
    with pytest.raises(ConfigError, match=message) as caught:
        guard.load_state_dict(change(guard.state_dict()))
    assert "\n" not in str(caught.value)
    assert_unchanged(guard, before, stats)


def assert_unchanged(guard, before, stats=None) -> None:
    after = guard.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[n], t) for n, t in before.items())
    assert stats is None or guard.stats() == stats


@every_method
def test_every_tensor_that_is_cut_or_missing_is_noticed(name):
    model, optimizer, guard = started(name)
    learn(model, optimizer, guard, (0,))
    whole = guard.state_dict()
    for key in whole:
        if not key.startswith("memory."):
            continue
        with pytest.raises(ConfigError, match="the state is damaged"):
            guard.load_state_dict(without(whole, key))
        if whole[key].dim():
            with pytest.raises(ConfigError, match="the state is damaged"):
                guard.load_state_dict(shortened(whole, key))
    assert_unchanged(guard, whole)


@pytest.mark.parametrize("name", ["ogd", "ogd, factored", "ewc", "a-gem"])
def test_another_model(name):
    method, storage = METHODS[name]
    model, optimizer, guard = started(name)
    learn(model, optimizer, guard, (0,))
    state = guard.state_dict()
    for other, message in (
        (mlp(hidden=7), r"another model: 0.weight is \(40, 12\) there and \(7, 12\) here"),
        (nn.Sequential(nn.Linear(12, 40)), "another model: 2.weight is .* there and missing here"),
        (nn.Sequential(*mlp(), nn.Linear(4, 4)), "3.weight is missing there and"),
    ):
        its = optim.SGD(other.parameters())
        fresh = Guard(other, its, method, storage=storage)
        before = fresh.state_dict()
        with pytest.raises(ConfigError, match=message):
            fresh.load_state_dict(state)
        assert_unchanged(fresh, before)


def test_the_same_parameters_in_another_order():
    model, optimizer, guard = started("ogd")
    learn(model, optimizer, guard, (0,))
    other = mlp()
    fresh = Guard(other, optim.SGD(other.parameters()), OGD(), params=["2", "0"])
    with pytest.raises(ConfigError, match="the parameters come in another order"):
        fresh.load_state_dict(guard.state_dict())


def test_another_method():
    model, optimizer, guard = started("ogd")
    learn(model, optimizer, guard, (0,))
    for method in (PCAOGD(), AGEM(), EWC(), Joint(), GEM(), SGD()):
        other = mlp()
        fresh = Guard(other, optim.SGD(other.parameters()), method)
        message = f"the state is one of ogd, and this guard uses {method.name}"
        with pytest.raises(ConfigError, match=message):
            fresh.load_state_dict(guard.state_dict())
        assert fresh.tasks == 0


def test_rows_on_a_device_that_is_not_here_come_to_the_weights():
    model, optimizer, guard = started("ogd, cpu")
    learn(model, optimizer, guard, (0,))
    state = guard.state_dict()
    elsewhere = with_header(state, storage={**header(state)["storage"], "device": "cuda:7"})
    guard.remove()
    untold = Guard(model, optimizer, OGD(10))
    untold.load_state_dict(elsewhere)
    assert untold.memory_report().storage == "dense rows"


def test_a_method_without_restore_says_so():
    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters()), Bare())
    guard.end_task(task(0))
    with pytest.raises(ConfigError, match="Bare has no `restore`: its memory cannot be loaded"):
        guard.load_state_dict(guard.state_dict())
