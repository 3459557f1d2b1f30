"""A budget of bytes: what is chosen and what is given up to fit it."""

import re
import warnings

import pytest
import torch
from torch import nn, optim

import forgetless
from forgetless import AGEM, OGD, PCAOGD, ConfigError, Guard
from forgetless.support.validation import format_bytes, parse_bytes

from ..tangent import networks as net
from ..tangent.reference import built, integers
from .problems import flat, mlp, seeded, task, train


def directions(guard) -> torch.Tensor:
    return guard.state_dict()["memory.directions"]


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
    guard = Guard(model, optimizer, method, storage=storage, budget=budget, drift_samples=0)
    messages = []
    for number in range(4):
        train(model, optimizer, task(number), steps=5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            guard.end_task(task(number))
        messages += [str(w.message) for w in caught]
        report = guard.memory_report()
        assert report.bytes <= parse_bytes(budget)
        kept = guard.state_dict()
        assert sum(
            t.nbytes
            for n, t in kept.items()
            if n.startswith("memory.")
            and "layout" not in n
            and not n.endswith(("ranks", "shares", "structure"))
        ) <= parse_bytes(budget)
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
        guard = Guard(model, optim.SGD(model.parameters()), method, budget="1GB")
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
    guard = Guard(model, optimizer, OGD(10), budget=100)
    message = "budget must be enough for at least one direction, .*B for this model, not 100 B"
    with pytest.raises(ConfigError, match=message):
        guard.end_task(task(0))
    assert guard.tasks == 0
    assert guard.memory_report().notes == ()


def test_a_budget_is_for_directions():
    model = mlp()
    with pytest.raises(ConfigError, match="that keep directions, such as KronOGD, not a-gem"):
        Guard(model, optim.SGD(model.parameters()), AGEM(), budget="1MB")


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
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "lots", "-5MB", "0", "5 XB", "infMB", "nan", 0, -3, True, [], None, "0.1 B", 1e999]
)
def test_numbers_of_bytes_that_are_none(text):
    with pytest.raises(
        ConfigError, match=r"budget must be a number of bytes such as '512MB', '1\.5GiB"
    ):
        parse_bytes(text)


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
    assert format_bytes(count) == words


def test_sequences_of_different_lengths_stay_within_the_budget():
    """Long ones say more and take more: how many fit cannot be told from the mean."""
    model = built(
        lambda: net.Calls(
            lambda m, t: m.out(m.tokens(t).sum(1)),
            tokens=nn.Embedding(net.V, net.D),
            out=nn.Linear(net.D, net.V),
        )
    ).float()
    optimizer = optim.SGD(model.parameters())
    batches = [(integers(net.V, 6, n, seed=n), integers(net.V, 6, seed=n)) for n in (1, 1, 1, 30)]
    with Guard(model, optimizer, OGD(), storage="factored") as whole:
        whole.end_task(batches)
    for share in (0.9, 0.5, 0.2):
        budget = int(share * whole.memory_report().bytes)
        guard = Guard(model, optimizer, OGD(), storage="factored", budget=budget)
        guard.remove()
        with pytest.warns(UserWarning, match="directions kept"):
            guard.end_task(batches)
        report = guard.memory_report()
        assert 0.3 * budget < report.bytes <= budget


@pytest.mark.filterwarnings("ignore:task 1. factored samples made rows", "ignore:task 2")
def test_a_guard_takes_back_the_rows_that_its_budget_made_of_factored_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def made() -> forgetless.Guard:
        method = PCAOGD(components=4, samples=100)
        return forgetless.Guard(model, optimizer, method, storage="factored", budget="40KB")

    guard = made()
    guard.end_task((torch.randn(100, 20), torch.randint(0, 5, (100,))))
    state = guard.state_dict()
    guard.remove()
    again = made()
    again.load_state_dict(state)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in state.items())
    again.end_task((torch.randn(100, 20), torch.randint(0, 5, (100,))))
    assert again.tasks == 2
