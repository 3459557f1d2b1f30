"""What a task will cost: predicted before `end_task`, and compared with what it then takes."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

import forgetless.support.memory as memory
from forgetless import (
    AGEM,
    EWC,
    GEM,
    GEMNT,
    GPM,
    OGD,
    PCAOGD,
    SGD,
    SGP,
    SI,
    AdamNSCL,
    ConfigError,
    Guard,
    Joint,
    KFACLaplace,
    KronEWC,
    KronOGD,
    Method,
)
from forgetless.support.validation import MemoryShortageError

from .problems import CLASSES, INPUTS, mlp, seeded, task

WORDS, LENGTH, WIDTH = 11, 5, 8


class Tied(nn.Module):
    """A small language model: attention whose q, k and v share inputs, and a head that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight
        y = self.norm(x)
        x = x + self.out(scaled_dot_product_attention(self.q(y), self.k(y), self.v(y)))
        return self.head(x)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(64, CLASSES),
    )


def images(number: int):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(20, 2, 6, 6, generator=generator), torch.arange(20) % CLASSES


def tokens(number: int):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(WORDS, (20, LENGTH), generator=generator), None


def unlabelled(batch):
    return batch[0], batch[0]


MODELS = {
    "mlp": (mlp, task, {}),
    "cnn": (lambda: seeded(cnn), images, {}),
    "transformer": (lambda: seeded(Tied), tokens, {"output": "likelihood", "unpack": unlabelled}),
}
EXACT = {
    "sgd": SGD(),
    "joint": Joint(),
    "ewc": EWC(),
    "a-gem": AGEM(memory=7),
    "gem": GEM(memory=7),
    "gem-nt": GEMNT(memory=50),
    "ogd": OGD(samples=7),
    "ogd, all samples": OGD(samples=15),
    "pca-ogd": PCAOGD(components=4),
    "kron-ogd": KronOGD(),
    "kron-ogd, a share": KronOGD(energy=0.9),
    "kfac-laplace": KFACLaplace(),
    "kron-ewc": KronEWC(),
    "si": SI(),
}
BOUNDED = {
    "gpm": GPM(),
    "gpm, all": GPM(threshold=0.999999),
    "sgp": SGP(),
    "adam-nscl": AdamNSCL(),
    "pca-ogd, a share": PCAOGD(variance=0.9),
}


def made(kind: str, method, **options):
    make, data, more = MODELS[kind]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, data, Guard(model, optimizer, method, drift_samples=0, **more, **options)


@pytest.mark.filterwarnings("ignore:the gradient of")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", EXACT)
def test_bytes_are_those_that_are_then_stored(kind, name):
    _, data, guard = made(kind, EXACT[name])
    for number in range(2):
        least, most = guard.estimate(data(number)).bytes
        guard.end_task(data(number))
        assert guard.memory_report().bytes == most
        assert least <= most
        assert least == most or guard.method.keeps_directions


@pytest.mark.filterwarnings("ignore:the gradient of")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", BOUNDED)
def test_bytes_are_between_the_bounds(kind, name):
    _, data, guard = made(kind, BOUNDED[name])
    for number in range(2):
        least, most = guard.estimate(data(number)).bytes
        guard.end_task(data(number))
        assert least + most > 0
        assert least <= guard.memory_report().bytes <= most


@pytest.mark.parametrize("storage", ["bfloat16", "factored"])
@pytest.mark.parametrize("method", [OGD(samples=7), PCAOGD(components=4)])
@pytest.mark.parametrize("kind", MODELS)
def test_bytes_in_another_storage(kind, method, storage):
    _, data, guard = made(kind, method, storage=storage)
    estimate = guard.estimate(data(0))
    guard.end_task(data(0))
    assert guard.memory_report().bytes == estimate.bytes[1]
    assert estimate.storage == guard.memory_report().storage


@pytest.mark.parametrize("method", [OGD(samples=20), KronOGD(energy=0.9)])
def test_a_budget_bounds_the_bytes(method):
    _, data, guard = made("mlp", method, budget=9000)
    estimate = guard.estimate(data(0))
    with pytest.warns(UserWarning, match="given"):
        guard.end_task(data(0))
    assert estimate.bytes == (0, 9000)
    assert guard.memory_report().bytes <= 9000


@pytest.mark.parametrize("name", ["kron-ogd", "kron-ewc", "ewc", "a-gem", "gpm"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_without_weights_is_estimated_like_one_with_them(kind, name):
    method = {**EXACT, **BOUNDED}[name]
    _, data, guard = made(kind, method)
    make, _, more = MODELS[kind]
    with torch.device("meta"):
        empty = make()
    optimizer = torch.optim.SGD(empty.parameters(), lr=0.1)
    estimate = Guard(empty, optimizer, method, **more).estimate(data(0))
    assert estimate.bytes == guard.estimate(data(0)).bytes
    assert "without weights" in str(estimate)
    assert estimate.seconds >= 0


def test_kronecker_numbers_by_hand():
    """r² and c² with the bias, an eigenvalue for each and one for the rest; and the weights."""
    _, data, guard = made("mlp", KronOGD())
    sides = [40, INPUTS + 1, CLASSES, 40 + 1]
    numbers = sum(d * d + d + 1 for d in sides) + 40 * (INPUTS + 1) + CLASSES * 41
    assert guard.estimate(data(0)).bytes == (4 * numbers, 4 * numbers)
    assert guard.estimate().bytes == (4 * numbers, 4 * numbers)


@pytest.mark.parametrize("method", [KronOGD(), OGD(samples=5), GPM(), EWC(), GEM(memory=5)])
def test_nothing_changes(method):
    model, data, guard = made("cnn", method)
    twin, _, other = made("cnn", method)
    model.train()
    twin.train()
    model[3].eval()
    loader = DataLoader(TensorDataset(*data(0)), batch_size=8, shuffle=True)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    guard.estimate(loader)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert guard.tasks == 0
    guard.end_task(data(0))
    other.end_task(data(0))
    mine, its = guard.state_dict(), other.state_dict()
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[key], its[key]) for key in mine)


def test_seconds_grow_with_the_samples():
    _, _, guard = made("mlp", OGD(samples=5))
    estimate = guard.estimate(task())
    assert estimate.seconds > 0
    assert estimate.step_seconds > 0
    assert guard.estimate().seconds is None
    probed = []
    method = OGD(samples=1000)
    _, _, guard = made("mlp", method)
    for n in (30, 300):
        found = guard.estimate(task(n=n))
        probed.append(found.bytes[1])
    assert 10 * probed[0] < probed[1] < 30 * probed[0]


class Named(nn.Module):
    """A network whose outputs only a function of the user's can read."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return {"other": None, "scores": self.net(x)}


def test_a_pass_is_through_the_outputs_that_the_user_chose():
    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = lambda outputs, target: outputs["scores"].gather(1, target[:, None])[:, 0]  # noqa: E731
    guard = Guard(model, optimizer, KronOGD(), output=output, drift_samples=0)
    estimate = guard.estimate(task())
    guard.end_task(task())
    assert estimate.seconds > 0
    assert estimate.bytes[1] == guard.memory_report().bytes


@dataclass(frozen=True)
class Silent(Method[None]):
    """A method of a user's, which says nothing of its cost."""

    name: ClassVar[str] = "silent"
    acts_on = "update"

    def init(self, view):
        return None

    def update(self, g, state, view):
        return g, state

    def consolidate(self, state, view, task):
        return None


def test_what_is_unknown_is_said():
    _, data, guard = made("mlp", Silent())
    estimate = guard.estimate(data(0))
    assert estimate.bytes is estimate.seconds is None
    assert "Silent does not say what it stores" in str(estimate)
    _, data, guard = made("mlp", GEM())
    assert "GEM needs data" in str(guard.estimate())
    with pytest.raises(ConfigError, match="not an iterator"):
        guard.estimate(iter([data(0)]))


def test_it_is_printed():
    _, data, guard = made("mlp", GPM())
    lines = str(guard.estimate(data(0))).splitlines()
    assert lines[0].startswith("at most ")
    assert lines[0].endswith(" after the task, GPM")
    assert any(line.startswith("  end_task: about ") for line in lines)


@pytest.mark.parametrize("method", [KronOGD(), OGD(samples=20), PCAOGD(components=15)])
def test_a_shortage_is_said_before_it_happens(monkeypatch, method):
    _, data, guard = made("mlp", method)
    monkeypatch.setattr(memory, "free_memory", lambda device: 20_000.0)
    assert "takes" in guard.estimate(data(0)).shortage
    assert guard.estimate(data(0)).shortage in str(guard.estimate(data(0)))
    with pytest.raises(MemoryShortageError, match="20 kB are free"):
        guard.end_task(data(0))
    assert guard.tasks == 0
    monkeypatch.undo()
    assert not guard.estimate(data(0)).shortage
    guard.end_task(data(0))
    assert guard.tasks == 1
