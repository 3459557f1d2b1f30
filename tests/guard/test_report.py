"""Reports: how much of the steps was removed, what is stored and what it explains."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn, optim

from forgetless import (
    AGEM,
    EWC,
    GEM,
    OGD,
    PCAOGD,
    SGD,
    ConfigError,
    Guard,
    Joint,
    KronEWC,
    Storage,
)
from forgetless.support.validation import format_bytes
from forgetless.training.models import MLP

from ..tangent.reference import by_loop
from .problems import exact_basis, flat, guarded, mlp, seeded, task, train, wander


def test_stats_against_an_explicit_projection():
    model, optimizer, guard = guarded(optimizer=partial(optim.Adam, lr=1e-2))
    plain = mlp()
    other = optim.Adam(plain.parameters(), lr=1e-2)
    basis = exact_basis(model, *task(0))
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    sums = {n: torch.zeros(2).double() for n in sizes}
    shares = []
    for number in range(4):
        plain.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = flat(plain)
        wander(plain, other, number)
        step = flat(plain) - before
        removed = (step @ basis.T) @ basis
        shares.append(float(removed.square().sum() / step.square().sum()))
        parts = zip(
            step.split(list(sizes.values())), removed.split(list(sizes.values())), strict=True
        )
        for name, (whole, gone) in zip(sizes, parts, strict=True):
            sums[name] += torch.stack([whole.square().sum(), gone.square().sum()])
        wander(model, optimizer, number)
    stats = guard.stats()
    assert stats.steps == 4
    assert stats.last == pytest.approx(shares[-1], rel=1e-3)
    total = sum(sums.values())
    assert stats.removed == pytest.approx(float(total[1] / total[0]), rel=1e-3)
    for name, (whole, gone) in sums.items():
        assert stats.layers[name] == pytest.approx(float(min(1.0, gone / whole)), rel=1e-2)
    assert str(stats).startswith(f"{stats.removed:6.1%} of 4 steps removed")
    guard.end_task(task(1))
    kept = guard.stats()  # of the finished task, until the next step
    assert (kept.steps, kept.removed, kept.layers) == (4, stats.removed, stats.layers)
    assert kept.tasks == 2
    assert kept.drift.steps == 4
    wander(model, optimizer, 5)
    assert guard.stats().steps == 1


def test_what_the_steps_would_have_learned():
    """Of the first step and the eleventh, by an explicit projection."""
    model, optimizer, guard = guarded(optimizer=partial(optim.SGD, lr=0.05, momentum=0.9))
    basis = exact_basis(model, *task(0))
    sums = torch.zeros(2).double()
    for number in range(13):
        plain = copy.deepcopy(model)
        other = optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = flat(plain)
        wander(plain, other, number)
        step = before - flat(plain)
        gradient = torch.cat([p.grad.flatten() for p in plain.parameters()]).double()
        if number in (0, 10):
            sums += torch.stack([gradient @ step, gradient @ ((step @ basis.T) @ basis)])
        wander(model, optimizer, number)
    stats = guard.stats()
    assert stats.blocked == pytest.approx(float(sums[1] / sums[0]), rel=1e-3)
    assert guard.metrics()["blocked"] == stats.blocked
    assert f"{stats.blocked:6.1%} of what the steps would have learned" in str(stats)


@pytest.mark.parametrize("method", [EWC(strength=50), OGD(20)], ids=["ewc", "ogd"])
def test_going_up_along_minus_the_loss_is_weighed_alike(method):
    found = []
    for sign in (1, -1):
        make = partial(optim.SGD, lr=0.05, maximize=sign < 0)
        model, optimizer, guard = guarded(method=method, optimizer=make)
        assert guard.stats().blocked is guard.stats().pull is None
        x, y = task(1)
        for _ in range(21):
            optimizer.zero_grad()
            (sign * nn.functional.cross_entropy(model(x), y)).backward()
            optimizer.step()
        found.append(guard.stats())
    assert [stats.blocked is None for stats in found] == 2 * [method.acts_on == "gradient"]
    assert [stats.pull is None for stats in found] == 2 * [method.acts_on == "update"]
    weighed = [stats.blocked or stats.pull for stats in found]
    assert weighed[0] == pytest.approx(weighed[1], rel=1e-3)
    assert 0.01 < weighed[0] < 1


def test_the_pull_of_a_penalty():
    """Of EWC's springs, by their formula, at the first step and the eleventh."""
    model, optimizer, guard = guarded(method=EWC(strength=500.0))
    x, y = task(0)
    anchor, fisher = flat(model), 0
    for i in range(len(x)):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        fisher = fisher + torch.cat([p.grad.flatten() for p in model.parameters()]).double() ** 2
    sums = torch.zeros(2).double()
    x, y = task(1)
    for number in range(15):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        penalty = 500 * fisher / 30 * (flat(model) - anchor)
        if number in (0, 10):
            sums += torch.stack([gradient @ gradient, penalty @ penalty])
        optimizer.step()
    stats = guard.stats()
    assert stats.pull == pytest.approx(float((sums[1] / sums[0]).sqrt()), rel=1e-3)
    assert stats.pull > 0.1
    assert guard.metrics()["pull"] == stats.pull
    assert f"pull {stats.pull:.3g}: what was added" in str(stats)
    assert "blocked" not in guard.metrics()


def test_the_numbers_of_a_penalty_until_the_next_step():
    model, optimizer, guard = guarded(method=KronEWC(samples=30))
    assert str(guard.stats()).startswith("strength 3\nno step yet since the latest task")
    train(model, optimizer, task(1), steps=3)
    stats = guard.stats()
    assert stats.pull is not None
    guard.end_task(task(1))
    kept = guard.stats()
    assert (kept.pull, kept.method, kept.tasks) == (stats.pull, stats.method, 2)
    train(model, optimizer, task(2))
    assert guard.stats().drift != kept.drift or guard.stats().pull != kept.pull


def test_stats_of_steps_of_nothing():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD())
    assert str(guard.stats()) == "no task is stored yet: nothing is protected"
    guard.end_task(task(0))
    optimizer.step()  # no gradients yet
    assert guard.stats().steps == 0
    assert str(guard.stats()) == "no step yet since the latest task was stored"
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    stats = guard.stats()
    assert (stats.steps, stats.removed, stats.last) == (1, 0.0, 0.0)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-30)  # squares underflow in float32
    optimizer.step()
    assert guard.stats().removed >= 0


def crowded(method, **options):
    """A model with more samples than parameters: nothing is left to learn."""
    model = seeded(lambda: nn.Linear(12, 4))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, method, **options)
    x, y = task(0, n=200)
    guard.end_task((x, y))
    return model, optimizer, guard


@pytest.mark.parametrize("project", ["update", "gradient"])
def test_no_room_to_learn_is_said_once(project):
    model, optimizer, guard = crowded(OGD(200), project=project)
    with pytest.warns(
        UserWarning,
        match=r"no room to learn: 100\.0% of what the steps would learn is removed; set samples",
    ) as caught:
        train(model, optimizer, task(1), steps=160)
    assert len(caught) == 1
    assert guard.stats().removed > 0.95
    guard.end_task(task(1))
    train(model, optimizer, task(1), steps=60)


def test_no_room_to_learn_is_said_at_the_end_of_a_short_task():
    model, optimizer, guard = crowded(OGD(200))
    train(model, optimizer, task(1), steps=5)
    with pytest.warns(UserWarning, match="leave no room to learn"):
        guard.end_task(task(1))


def test_long_steps_of_a_head_that_is_full_leave_the_rest_room_to_learn():
    """Two optimizers, one of a head whose steps are long and removed, one that learns."""
    model = mlp()
    body = optim.SGD(model[0].parameters(), lr=0.05)
    head = optim.SGD(model[2].parameters(), lr=0.05, weight_decay=60.0)
    guard = Guard(model, [body, head], OGD(300))
    guard.end_task(task(0, n=300))
    x, y = task(1)
    for _ in range(60):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        body.step()
        head.step()
    stats = guard.stats()
    assert stats.removed > 0.95 > stats.blocked


def test_no_warning_where_there_is_room():
    model, optimizer, guard = crowded(PCAOGD(10))
    train(model, optimizer, task(1), steps=120)
    guard.end_task(task(1))
    assert guard.stats().removed < 0.95


@pytest.mark.parametrize("storage", ["dense", "bfloat16", "cpu", "factored", Storage(max_rank=50)])
@pytest.mark.parametrize("method", [OGD(12), PCAOGD(6, samples=20), PCAOGD(6, 20, centred=True)])
def test_every_storage_learns_alike(storage, method):
    """To the rounding that is stated: 1e-3 for bfloat16, none for the others."""
    results = []
    for kept in ("dense", storage):
        model = mlp()
        optimizer = optim.Adam(model.parameters(), lr=1e-3)
        guard = Guard(model, optimizer, method, storage=kept)
        for number in range(3):
            train(model, optimizer, task(number), steps=5, seed=number)
            guard.end_task(task(number))
        results.append((flat(model), guard.memory_report()))
    (expected, dense), (found, report) = results
    tolerance = 3e-3 if storage == "bfloat16" else 3e-5
    assert float((found - expected).norm()) <= tolerance * float((flat(mlp()) - expected).norm())
    assert report.directions == dense.directions
    assert report.share == pytest.approx(dense.share, rel=1e-4)
    assert [t.share for t in report.tasks] == pytest.approx([t.share for t in dense.tasks])
    assert [t.directions for t in report.tasks] == [t.directions for t in dense.tasks]


def test_bfloat16_leaks_a_thousandth_and_says_so():
    model, optimizer, _ = guarded(storage="bfloat16")
    basis = exact_basis(model, *task(0))
    before = flat(model)
    wander(model, optimizer, 0)
    delta = flat(model) - before
    assert 1e-6 < float((basis @ delta).norm() / delta.norm()) < 3e-3
    assert "about 1e-3 of a protected component" in " ".join(Storage.__doc__.split())


def test_the_report_of_dense_rows():
    _, _, guard = guarded(method=OGD(10))
    report = guard.memory_report()
    p = sum(t.numel() for t in mlp().parameters())
    assert report.storage == "dense rows"
    assert report.directions == 10
    assert report.layers == {n: 40 * t.numel() for n, t in mlp().named_parameters()}
    assert report.bytes == 40 * p + 8 * 100
    assert report.share == pytest.approx(1.0)
    (only,) = report.tasks
    assert (only.directions, only.bytes, only.share) == (10, report.bytes, 1.0)
    text = str(report)
    assert re.match(r"28\.2 kB, dense rows, 10 directions, 100\.0% of the variance\n", text)
    assert "  task 1: 28.2 kB, 10 directions, 100.0% of its variance, at its end\n" in text
    assert "  0.weight: 19.2 kB\n" in text


def test_factored_samples_are_fifty_times_smaller():
    model = seeded(lambda: MLP(784, 100, 10))
    data = torch.randn(20, 784), torch.arange(20) % 10
    dense, factored = (
        Guard(model, optim.SGD(model.parameters()), OGD(20), storage=kind)
        for kind in ("dense", "factored")
    )
    for guard in (dense, factored):
        guard.end_task(data)
    small, large = factored.memory_report(), dense.memory_report()
    numbers = (784 + 100) + (100 + 100) + (100 + 10)
    assert sum(small.layers.values()) == 4 * 20 * numbers
    assert small.bytes == 4 * 20 * numbers + 3 * 8 * 20**2
    assert large.bytes / small.bytes > 50
    assert small.directions == large.directions == 20


def test_shares_of_principal_directions():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, PCAOGD(5, samples=1000))
    shares = []
    for number in range(2):
        train(model, optimizer, task(number), steps=5)
        guard.end_task(task(number))
        exact = mlp().double()
        exact.load_state_dict({n: v.double() for n, v in model.state_dict().items()})
        x, y = task(number, dtype=torch.float64)
        squares = torch.linalg.svdvals(by_loop(exact, x, y)).square()
        shares.append(float(squares[:5].sum() / squares.sum()))
    report = guard.memory_report()
    assert [t.share for t in report.tasks] == pytest.approx(shares, rel=1e-4)
    assert report.share == pytest.approx(sum(shares) / 2, rel=1e-4)
    assert [t.directions for t in report.tasks] == [5, 5]
    assert sum(t.bytes for t in report.tasks) == pytest.approx(report.bytes, abs=2)


@pytest.mark.parametrize("method", [AGEM(10), GEM(10), Joint(), EWC(), SGD()])
def test_the_report_of_other_memories(method):
    _, _, guard = guarded(method=method)
    report = guard.memory_report()
    p = sum(t.numel() for t in mlp().parameters())
    sample = 4 * 12 + 8
    sizes = {"a-gem": 10 * sample, "gem": 10 * sample, "joint": 30 * sample, "ewc": 8 * p}
    assert report.bytes == sizes.get(method.name, 0)
    assert (report.directions, report.share) == (0, None)
    assert [t.bytes for t in report.tasks] == [report.bytes]
    assert format_bytes(report.bytes) in str(report)


def test_the_report_before_the_first_task():
    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters()), OGD())
    report = guard.memory_report()
    assert (report.bytes, report.directions, report.share, report.tasks) == (0, 0, None, ())
    assert str(report).startswith("0 B, dense rows")


@pytest.mark.parametrize("storage", ["dense", "factored"])
@pytest.mark.parametrize("method", [OGD(10), PCAOGD(10, samples=30)], ids=["ogd", "pca-ogd"])
def test_max_rank_bounds_directions_and_says_what_is_left(storage, method):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, method, storage=storage, max_rank=15)
    shares = []
    for number in range(3):
        train(model, optimizer, task(number), steps=5)
        guard.end_task(task(number))
        shares.append(guard.memory_report().share)
        assert guard.memory_report().directions == min(15, 10 * (number + 1))
    assert shares[0] > shares[1] > shares[2] > 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"storage": "disk"},
            "storage must be 'dense', 'bfloat16', 'cpu', 'factored' or a Storage",
        ),
        ({"storage": ["dense"]}, "storage must be 'dense'"),
        ({"max_rank": 0}, "max_rank must be a whole number of at least 1"),
        ({"budget": "much"}, "budget must be a number of bytes"),
    ],
)
def test_options_that_cannot_be(options, message):
    model = mlp()
    with pytest.raises(ConfigError, match=message):
        Guard(model, optim.SGD(model.parameters()), OGD(), **options)


@pytest.mark.parametrize("storage", ["dense", "factored"])
def test_refreshed_directions_are_those_of_the_present_weights(storage):
    make = partial(optim.Adam, lr=1e-2)
    model, optimizer, guard = guarded(optimizer=make, storage=storage)
    guard.end_task(task(1))
    train(model, optimizer, task(2), steps=20)
    guard.refresh(task(0), task(1))
    assert guard.tasks == 2
    basis = torch.cat([exact_basis(model, *task(t)) for t in range(2)])
    basis = torch.linalg.qr(basis.T)[0].T
    before = flat(model)
    wander(model, optimizer, 0)
    delta = flat(model) - before
    assert float((basis @ delta).norm() / delta.norm()) < 1e-5
    for few in ((), (task(0),)):
        message = "refresh's loaders must be 2, one for each earlier task"
        with pytest.raises(ConfigError, match=message):
            guard.refresh(*few)
