"""Memory as a budget: how directions are kept, what was chosen, what was lost."""

import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn, optim

from forgetless import AGEM, EWC, GEM, OGD, PCAOGD, SGD, ConfigError, Guard, Joint, Storage
from forgetless.guard.report import in_words, parsed_bytes
from forgetless.models import MLP

from ..tangent.reference import by_loop
from .problems import exact_basis, flat, guarded, mlp, seeded, task, train, wander


def directions(guard) -> torch.Tensor:
    return guard.state_dict()["memory.directions"]


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
    assert "about 1e-3 of a protected\n            component" in Storage.__doc__


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
    assert "  task 1: 28.2 kB, 10 directions, 100.0% of its variance\n" in text
    assert "  0.weight: 19.2 kB\n" in text


def test_factored_samples_are_fifty_times_smaller():
    model = seeded(lambda: MLP(784, 100, 10))
    optimizer = optim.SGD(model.parameters())
    data = torch.randn(20, 784), torch.arange(20) % 10
    dense, factored = (
        Guard(model, optimizer, OGD(20), storage=kind, project="gradient")
        for kind in ("dense", "factored")
    )
    for guard in (dense, factored):
        guard.end_task(data)
    small, large = factored.memory_report(), dense.memory_report()
    numbers = (784 + 100) + (100 + 100) + (100 + 10)
    assert sum(small.layers.values()) == 4 * 20 * numbers
    assert small.bytes == 4 * 20 * numbers + 2 * 8 * 20**2
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
    sizes = {"a-gem": 10 * sample, "gem": 10 * sample, "joint": 30 * sample + 8, "ewc": 8 * p}
    assert report.bytes == sizes.get(method.name, 0)
    assert (report.directions, report.share) == (0, None)
    assert [t.bytes for t in report.tasks] == [report.bytes]
    assert in_words(report.bytes) in str(report)


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


BUDGETS = {
    "dense, all fits": (OGD(10), "dense", "1MB", 30, None),
    "dense, rounded": (OGD(10), "dense", "52kB", 30, "bfloat16"),
    "dense, fewer": (OGD(10), "dense", "20kB", 13, "directions kept"),
    "factored, fewer": (OGD(10), "factored", "6 kB", 9, "directions kept"),
    "factored PCA": (PCAOGD(10, samples=30), "factored", "20kB", 13, "made rows"),
    "chosen for OGD": (OGD(10), None, "10 kB", 12, "directions kept"),
    "chosen for PCA": (PCAOGD(10, samples=30), None, "20kB", 13, "directions kept"),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_never_above_the_budget(case):
    method, storage, budget, least, lost = BUDGETS[case]
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, method, storage=storage, memory=budget)
    messages = []
    for number in range(4):
        train(model, optimizer, task(number), steps=5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            guard.end_task(task(number))
        messages += [str(w.message) for w in caught]
        report = guard.memory_report()
        assert report.bytes <= parsed_bytes(budget)
        kept = guard.state_dict()
        assert sum(
            t.nbytes
            for n, t in kept.items()
            if n.startswith("memory.") and "layout" not in n and not n.endswith(("ranks", "shares"))
        ) <= parsed_bytes(budget)
    report = guard.memory_report()
    assert report.directions >= least
    said = [note for note in report.notes if not note.endswith("chosen")]
    assert said == messages
    assert bool(messages) == (lost is not None)
    if lost is not None:
        assert any(lost in message for message in messages)
        assert re.match(
            r"task \d: .*given; [\d.]+% of the variance was explained, [\d.]+%", said[0]
        )
        assert "%.1f%% is now" % (100 * report.share) in said[-1]
        assert report.share < 1
    if storage is None:
        assert report.notes[0].endswith("chosen")
    # And what is left is protected.
    before = flat(model)
    train(model, optimizer, task(5))
    if "memory.directions" in guard.state_dict():
        rows = directions(guard).double()
        delta = flat(model) - before
        assert float((rows @ delta).norm() / delta.norm()) < 1e-2


def test_the_cheaper_storage_is_chosen():
    def chosen(model, method, data):
        guard = Guard(model, optim.SGD(model.parameters()), method, memory="1GB")
        guard.end_task(data)
        return guard.memory_report().notes[0]

    images = torch.randn(8, 3, 16, 16), torch.arange(8) % 4
    wide = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 300), nn.Linear(300, 4)))
    assert chosen(wide, OGD(8), images) == "factored samples chosen"
    # A small convolution over many positions is smaller as a row.
    small = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    assert chosen(small, OGD(8), images) == "dense rows chosen"
    # Of PCA's many samples all would stay.
    assert chosen(mlp(), PCAOGD(2, samples=3000), task(0)) == "dense rows chosen"
    assert chosen(wide, PCAOGD(4, samples=8), images) == "factored samples chosen"


def test_a_budget_below_one_direction_is_refused_and_changes_nothing():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD(10), memory=100)
    message = "memory must be enough for at least one direction, .*B for this model, not 100 B"
    with pytest.raises(ConfigError, match=message):
        guard.end_task(task(0))
    assert guard.tasks == 0
    assert guard.memory_report().notes == ()


def test_a_budget_is_for_directions():
    model = mlp()
    with pytest.raises(ConfigError, match="memory= is for methods that keep directions, not a-gem"):
        Guard(model, optim.SGD(model.parameters()), AGEM(), memory="1MB")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512MB", 512 * 10**6),
        ("1.5 GiB", 3 * 2**29),
        (" 10 kb ", 10_000),
        ("77", 77),
        ("2TiB", 2**41),
        ("1e3MB", 10**9),
        (10_000, 10_000),
        (1.5e3, 1500),
    ],
)
def test_numbers_of_bytes(text, count):
    assert parsed_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "lots", "-5MB", "0", "5 XB", "infMB", "nan", 0, -3, True, [], None, "0.1 B", 1e999]
)
def test_numbers_of_bytes_that_are_none(text):
    with pytest.raises(
        ConfigError, match=r"memory must be a number of bytes such as '512MB', '1\.5GiB"
    ):
        parsed_bytes(text)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (2.5e6, "2.5 MB"),
        (3e9, "3 GB"),
        (4e12, "4 TB"),
    ],
)
def test_bytes_in_words(count, words):
    assert in_words(count) == words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"storage": "disk"},
            "storage must be 'dense', 'bfloat16', 'cpu', 'factored' or a Storage",
        ),
        ({"storage": ["dense"]}, "storage must be 'dense'"),
        ({"max_rank": 0}, "max_rank must be a whole number of at least 1"),
        ({"memory": "much"}, "memory must be a number of bytes"),
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
    with pytest.raises(ConfigError, match="refresh's loaders must be one for each earlier task"):
        guard.refresh()
