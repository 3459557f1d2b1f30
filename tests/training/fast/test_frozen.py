"""Networks whose first layers are frozen: cut off, they train as whole ones do."""

import pytest
import torch
from torch import nn

from forgetless import AGEM, EWC, GEM, OGD, PCAOGD, SGD, Joint, Training, fit
from forgetless.training.fast import frozen as room
from forgetless.training.fast.frozen import frozen_start
from forgetless.training.learner import Learner
from forgetless.training.models import LeNet
from tests.conftest import blobs
from tests.training.fast.test_recording import weights

METHODS = [SGD(), AGEM(6, 4), Joint(5), EWC(1.0), OGD(5), PCAOGD(4, 12), GEM(4)]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()),
        nn.Linear(8, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3),
    )  # fmt: skip


def training(**changes) -> Training:
    settings = {"lr": 0.05, "epochs": 3, "batch_size": 8, "dtype": "float64", "freeze": "0."}
    return Training(**settings | {"eval_mode_after": 13, "seeds_together": 2} | changes)


@pytest.mark.parametrize("after", [13, 15])  # the first task has fifteen steps
@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_cut_or_whole_is_the_same(method, together, after, monkeypatch):
    tasks = blobs(tasks=3, n=41)
    cuts = []
    seen = Learner._seen

    def noted(self, split):
        before, split = self.front.is_cut, seen(self, split)
        if self.front.is_cut and not before:
            cuts.append(self.steps)
        return split

    monkeypatch.setattr(Learner, "_seen", noted)
    settings = training(seeds_together=together, eval_mode_after=after)
    found = fit(tasks, method, network, seeds=2, training=settings)
    assert cuts == [after] * (2 // together)
    monkeypatch.setattr(room, "frozen_start", lambda network: None)
    expected = fit(tasks, method, network, seeds=2, training=settings)
    assert len(cuts) == 2 // together
    for one, other in zip(weights(found), weights(expected), strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-11)
    assert (found.accuracy[..., 0] == expected.accuracy[..., 0]).all()


def test_an_activation_that_is_used_twice_stays_in_both_parts(monkeypatch):
    def shared() -> nn.Module:
        act = nn.Tanh()
        return nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 5), act, nn.Linear(5, 3))

    settings = training(eval_mode_after=1)
    found = fit(blobs(tasks=2, n=41), SGD(), shared, seeds=2, training=settings)
    monkeypatch.setattr(room, "frozen_start", lambda network: None)
    expected = fit(blobs(tasks=2, n=41), SGD(), shared, seeds=2, training=settings)
    for one, other in zip(weights(found), weights(expected), strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_mode_after": 0},  # batch norm goes on changing
        {"eval_mode_after": 17},  # something is remembered by then
        {"freeze": "1."},  # not at the beginning
    ],
)
def test_what_is_not_cut(changes, monkeypatch):
    def refuse(self):
        raise AssertionError("it was cut")

    monkeypatch.setattr(room.Front, "cut", refuse)
    fit(blobs(tasks=2, n=41), AGEM(6, 4), network, seeds=1, training=training(**changes))


def test_outputs_that_are_too_large_are_not_kept(monkeypatch):
    monkeypatch.setattr(room, "_MOST_BYTES", 41 * 8 * 8 - 1)
    test_what_is_not_cut({}, monkeypatch)


def test_a_module_of_ones_own_may_do_anything(monkeypatch):
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))

    def noisy() -> nn.Module:
        return nn.Sequential(Noisy(6, 8), nn.Linear(8, 3))

    def refuse(self):
        raise AssertionError("it was cut")

    monkeypatch.setattr(room.Front, "cut", refuse)
    fit(blobs(tasks=2, n=41), SGD(), noisy, seeds=1, training=training())


def test_the_papers_network_is_cut_behind_its_convolutions():
    from forgetless.training.network import Network

    net = Network(
        [LeNet((3, 8, 8), 5, 4) for _ in range(2)],
        torch.ones(1, 4, dtype=torch.bool),
        is_free=lambda name: False,
        is_frozen=lambda name: name.startswith("convolutions"),
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    start = frozen_start(net)
    assert [name for name, _ in start.module.named_children()] == ["convolutions"]
    assert [name for name, _ in start.rest.module.named_children()] == ["body", "head"]
    net.module.eval()
    inputs = torch.rand(2, 3, 3, 8, 8, dtype=torch.float64)
    whole = net.logits(net.theta, inputs)
    assert torch.allclose(start.rest.logits(net.theta, start._run(inputs)), whole, atol=1e-12)
