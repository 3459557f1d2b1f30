"""A state resumes bit for bit; one that does not fit is rejected and changes nothing."""

import io
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import nn, optim

from forgetless import AGEM, EWC, GEM, OGD, PCAOGD, SGD, ConfigError, Guard, Joint, Storage
from forgetless.methods.reservoir import ReservoirRehearsal
from tests.methods.test_all_methods import TABLE

from .problems import flat, mlp, seeded, task, train

METHODS = {
    **{name: (method, "dense") for name, method in TABLE.items() if name != "a-gem, released"},
    "ogd, factored": (OGD(10), "factored"),
    "ogd, bfloat16": (OGD(10), "bfloat16"),
    "ogd, cpu": (OGD(10), "cpu"),
    "pca-ogd, factored": (PCAOGD(6, samples=20), "factored"),
    "ogd, max_rank": (OGD(10), Storage("factored", max_rank=13)),
}
every_method = pytest.mark.parametrize("name", METHODS)


def started(name: str, adam: bool = True):
    method, storage = METHODS[name]
    model = mlp()
    make = optim.Adam if adam else optim.SGD
    optimizer = make(model.parameters(), lr=1e-2)
    return model, optimizer, Guard(model, optimizer, method, storage=storage)


def learn(model, optimizer, guard, numbers) -> None:
    for number in numbers:
        train(model, optimizer, task(number), steps=4, seed=number, guard=guard)
        guard.end_task(task(number))


def through_safetensors(state):
    return load(save(state))


def through_torch(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("through", [through_safetensors, through_torch, dict])
@every_method
def test_resumed_training_is_the_same_bit_for_bit(name, through):
    model, optimizer, guard = started(name)
    learn(model, optimizer, guard, (0, 1))
    saved = through(guard.state_dict())
    weights = {n: v.clone() for n, v in model.state_dict().items()}
    moments = through_torch(optimizer.state_dict())
    learn(model, optimizer, guard, (2, 3))

    again, other, resumed = started(name)
    again.load_state_dict(weights)
    other.load_state_dict(moments)
    resumed.load_state_dict(saved)
    assert resumed.tasks == 2
    assert str(resumed.memory_report()) == str(started_report(name))
    learn(again, other, resumed, (2, 3))
    assert torch.equal(flat(model), flat(again))
    first, second = guard.state_dict(), resumed.state_dict()
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key


def started_report(name):
    model, optimizer, guard = started(name)
    learn(model, optimizer, guard, (0, 1))
    return guard.memory_report()


@every_method
def test_the_state_is_a_copy_and_so_is_what_was_loaded(name):
    model, optimizer, guard = started(name)
    learn(model, optimizer, guard, (0,))
    saved = guard.state_dict()
    kept = {n: t.clone() for n, t in saved.items()}
    learn(model, optimizer, guard, (1,))
    assert all(torch.equal(saved[n], t) for n, t in kept.items())
    guard.load_state_dict(saved)
    for tensor in saved.values():
        tensor.zero_()
    assert all(torch.equal(guard.state_dict()[n], t) for n, t in kept.items())


@every_method
def test_a_guard_that_remembers_nothing_yet(name):
    _, _, guard = started(name)
    saved = through_safetensors(guard.state_dict())
    model, optimizer, other = started(name, adam=False)
    learn(model, optimizer, other, (0,))
    other.load_state_dict(saved)
    assert other.tasks == 0
    if isinstance(other.method, ReservoirRehearsal):
        return  # it repeats samples from the first batch on
    # Nothing is guarded again, to the bit.
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    train(model, optimizer, task(1), steps=5, guard=other)
    train(plain, optim.SGD(plain.parameters(), lr=1e-2), task(1), steps=5)
    assert torch.equal(flat(model), flat(plain))


def test_loading_while_attached_takes_effect_at_once():
    model, optimizer, guard = started("ogd", adam=False)
    learn(model, optimizer, guard, (0,))
    saved = guard.state_dict()
    other, its, fresh = started("ogd", adam=False)
    fresh.load_state_dict(saved)
    rows = saved["memory.directions"].double()
    before = flat(other)
    train(other, its, task(1), steps=3)
    delta = flat(other) - before
    assert float((rows @ delta).norm() / delta.norm()) < 1e-5
    assert fresh.stats().steps == 3


def test_other_hyperparameters_go_on_with_their_own():
    model, optimizer, guard = started("ogd")
    learn(model, optimizer, guard, (0,))
    other = mlp()
    fresh = Guard(other, optim.SGD(other.parameters()), OGD(samples=3))
    fresh.load_state_dict(guard.state_dict())
    fresh.end_task(task(1))
    assert [t.directions for t in fresh.memory_report().tasks] == [15, 3]


def test_weights_of_another_precision():
    for name in ("ogd", "ogd, factored", "ewc"):
        method, storage = METHODS[name]
        model, optimizer, guard = started(name)
        learn(model, optimizer, guard, (0,))
        other = mlp().double()
        its = optim.SGD(other.parameters(), lr=0.1)
        fresh = Guard(other, its, method, storage=storage)
        fresh.load_state_dict(guard.state_dict())
        train(other, its, task(1, dtype=torch.float64), steps=2)
        fresh.end_task(task(1, dtype=torch.float64))
        assert fresh.tasks == 2


def convolutional():
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(18, 4),
        )
    )


@pytest.mark.parametrize("method", [OGD(10), PCAOGD(6, samples=20)], ids=["ogd", "pca-ogd"])
def test_factors_of_convolutions_resume_bit_for_bit_too(method):
    """Tensors come out of a file laid out in order, whatever they were before."""
    images = lambda number: (task(number)[0].view(-1, 1, 4, 3).repeat(1, 1, 1, 2), task(number)[1])  # noqa: E731
    found = []
    for resumed in (False, True):
        model = convolutional()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        guard = Guard(model, optimizer, method, storage="factored")
        for number in range(3):
            train(model, optimizer, images(number), steps=3, seed=number)
            guard.end_task(images(number))
            if resumed:
                state = through_safetensors(guard.state_dict())
                guard.remove()
                guard = Guard(model, optimizer, method, storage="factored")
                guard.load_state_dict(state)
        train(model, optimizer, images(3), steps=3)
        found.append((flat(model), guard.state_dict()))
    assert torch.equal(found[0][0], found[1][0])
    for name, tensor in found[0][1].items():
        assert torch.equal(tensor, found[1][1][name]), name


# How the state was kept, what the guard that loads it is told, and what it then keeps.
TOLD = {
    "nothing": ({"storage": "bfloat16"}, {}, ("dense rows in bfloat16", 10)),
    "fewer": ({}, {"max_rank": 3}, ("dense rows", 3)),
    "rounded": ({}, {"storage": "bfloat16", "max_rank": 4}, ("dense rows in bfloat16", 4)),
    "rows": ({"storage": "factored"}, {"storage": "dense"}, ("dense rows", 10)),
    "fewer samples": ({"storage": "factored"}, {"max_rank": 2}, ("factored samples", 2)),
    "bytes": ({}, {"budget": "12kB"}, ("dense rows in bfloat16", 8)),
    "precise": ({"storage": "bfloat16"}, {"storage": "dense"}, ("dense rows", 10)),
    "NumPy's": ({"max_rank": np.int64(3)}, {}, ("dense rows", 3)),
}


@pytest.mark.filterwarnings("ignore:task 2. rows rounded")
@pytest.mark.parametrize("case", TOLD)
def test_a_state_is_kept_as_the_guard_that_loads_it_is_told(case):
    before, now, (storage, rank) = TOLD[case]
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    first = Guard(model, optimizer, OGD(10), **before)
    first.end_task(task(0))
    first.remove()
    guard = Guard(model, optimizer, OGD(10), **now)
    guard.load_state_dict(first.state_dict())
    report = guard.memory_report()
    assert (report.storage, report.directions) == (storage, rank)
    if storage.startswith("dense"):
        kept = guard.state_dict()["memory.directions"].dtype
        assert kept == (torch.bfloat16 if "bfloat16" in storage else torch.float32)
    train(model, optimizer, task(1), steps=2)
    guard.end_task(task(1))
    report = guard.memory_report()
    assert report.storage == storage
    assert report.directions <= {**before, **now}.get("max_rank", 20)
    assert "memory" not in now or report.bytes <= 12_000


@pytest.mark.parametrize("before", ["dense", "factored", "bfloat16"])
@pytest.mark.parametrize("now", ["dense", "factored", "bfloat16"])
def test_a_state_without_tasks_takes_any_storage(before, now):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    first = Guard(model, optimizer, OGD(10), storage=before)
    state = first.state_dict()
    first.remove()
    guard = Guard(model, optimizer, OGD(10), storage=now)
    guard.load_state_dict(state)
    guard.end_task(task(0))
    expected = {"dense": "dense rows", "factored": "factored samples"}
    assert guard.memory_report().storage == expected.get(now, "dense rows in bfloat16")


def test_rows_cannot_become_factored_samples():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    first = Guard(model, optimizer, OGD(10))
    first.end_task(task(0))
    first.remove()
    guard = Guard(model, optimizer, OGD(10), storage="factored")
    with pytest.raises(ConfigError, match="dense rows, which cannot become factored samples"):
        guard.load_state_dict(first.state_dict())
    assert guard.tasks == 0


@pytest.mark.parametrize("seed", [-1, 1.5, "0", True])
def test_seeds_are_whole_numbers(seed):
    model = mlp()
    with pytest.raises(ConfigError, match="seed must be a whole number of at least 0"):
        Guard(model, optim.SGD(model.parameters()), OGD(), seed=seed)


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
