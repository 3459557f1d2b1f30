"""Early stopping and the plateau schedule, on samples that training does not see."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import pytest
import torch
from torch import nn

from forgetless import SGD, ConfigError, Method, TensorScenario, Training, fit
from forgetless.training.learner import HeldOut, Learner, part_held_out
from tests.conftest import blobs


def test_parts_are_disjoint_random_and_of_the_seed():
    split = blobs(n=40).task(0, [0]).train
    train, held_out = part_held_out(split, 0.25, 0, 0)
    assert (len(train), len(held_out)) == (30, 10)
    rows = torch.cat([train.inputs, held_out.inputs])
    assert len(rows.unique(dim=0)) == 40
    assert torch.equal(part_held_out(split, 0.25, 0, 0)[1].inputs, held_out.inputs)
    for seed, task in ((1, 0), (0, 1)):
        assert not torch.equal(part_held_out(split, 0.25, seed, task)[1].inputs, held_out.inputs)


def losses_of(monkeypatch, losses):
    """The held-out loss after each epoch, in place of the true one."""
    left = iter(losses)
    monkeypatch.setattr("forgetless.training.learner.mean_loss", lambda *args: next(left))


def rates_of(monkeypatch):
    """The learning rate of each step."""
    rates, plain = [], Learner.update

    def noted(self, samples):
        rates.append(self.view.lr)
        plain(self, samples)

    monkeypatch.setattr(Learner, "update", noted)
    return rates


SETTINGS = {"lr": 0.1, "epochs": 8, "batch_size": 100, "held_out": 0.25}


def test_a_task_ends_after_some_epochs_without_a_better_loss_at_the_best_weights(monkeypatch):
    losses_of(monkeypatch, [3.0, 2.0, 2.5, 2.0])
    trace = fit(blobs(tasks=1), SGD(), training=Training(**SETTINGS, early_stopping=2))
    losses_of(monkeypatch, [3.0, 2.0])
    settings = SETTINGS | {"epochs": 2}
    best = fit(blobs(tasks=1), SGD(), training=Training(**settings, early_stopping=2))
    for name, value in best.weights(0, 0).items():
        assert torch.equal(trace.weights(0, 0)[name], value)


def test_a_plateau_decays_the_rate_and_ends_the_task_below_the_least(monkeypatch):
    losses_of(monkeypatch, [3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    rates = rates_of(monkeypatch)
    training = Training(**SETTINGS, schedule="plateau", decay=0.5, decay_after=2, least_lr=0.04)
    fit(blobs(tasks=1), SGD(), training=training)
    assert rates == [0.1, 0.1, 0.1, 0.05, 0.05, 0.05]  # 0.025 is too small


def test_the_held_out_loss_is_the_mean_in_eval_mode(monkeypatch):
    found, plain = [], HeldOut.judge

    def judged(self, network, split, task, training, lr):
        plain(self, network, split, task, training, lr)
        module = model()
        module.load_state_dict(network.state_dict(0))
        logits = module.eval()(split.inputs)
        found.append((self.least, nn.functional.cross_entropy(logits, split.labels).item()))

    def model():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    monkeypatch.setattr(HeldOut, "judge", judged)
    settings = SETTINGS | {"epochs": 1, "dtype": "float32"}
    fit(blobs(tasks=1, n=40), SGD(), model, training=Training(**settings, early_stopping=2))
    least, expected = found[0]
    assert least == pytest.approx(expected, rel=1e-6)


def test_samples_that_interact_are_evaluated_so_many_together():
    """Batch norm without running statistics shows which samples went through together."""
    seen = []

    class Noting(nn.Module):
        def __init__(self):
            super().__init__()
            norm = nn.BatchNorm1d(8, track_running_stats=False)
            self.body = nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3))

        def forward(self, x):
            if not self.training:
                seen.append(len(x))
            return self.body(x)

    tasks = blobs(tasks=1, n=40)
    settings = SETTINGS | {"epochs": 1, "dtype": "float32"}
    training = Training(**settings, early_stopping=2, evaluation_batch=4)
    trace = fit(tasks, SGD(), Noting, training=training)
    test = tasks.task(0, [0]).test
    sizes = seen[-ceil(len(test) / 4) :]  # evaluation on the test set comes last
    assert sum(sizes) == len(test)
    assert max(sizes) - min(sizes) <= 1
    assert sum(seen[-len(sizes) - 3 : -len(sizes)]) == 10  # before it, the held-out samples
    module = Noting().eval()
    module.load_state_dict(trace.weights(0, 0))
    outputs = torch.cat([module(x) for x in test.inputs.split(sizes)])
    right = (outputs.argmax(1) == test.labels).double().mean()
    assert trace.accuracy[0, 0, 0] == pytest.approx(100 * right.item())
    together = fit(tasks, SGD(), Noting, training=Training(**settings, early_stopping=2))
    assert seen[-1] == len(test)
    assert together.config["evaluation_batch"] == 0


@dataclass(frozen=True)
class Everything(Method):
    """Stores all that it is given."""

    name: ClassVar[str] = "everything"
    acts_on: ClassVar[str] = "gradient"
    seen: ClassVar[list] = []

    def init(self, view):
        return None

    def update(self, g, state, view):
        self.seen.append(view.batch.inputs[0])
        return g, state

    def consolidate(self, state, view, task):
        self.seen.append(task.draw(task.size).inputs[0])
        return state


def test_a_method_does_not_see_held_out_samples():
    tasks = blobs(tasks=1, n=40)
    Everything.seen.clear()
    training = Training(**SETTINGS | {"epochs": 1}, early_stopping=1)
    fit(tasks, Everything(), training=training)
    held_out = part_held_out(tasks.task(0, [0]).train, 0.25, 0, 0)[1].inputs
    assert len(Everything.seen) == 2
    for inputs in Everything.seen:
        assert len(inputs) == 30
        assert not (inputs[:, None] == held_out[None]).all(2).any()


def test_a_share_that_leaves_nothing():
    pair = torch.eye(2), torch.tensor([0, 1])
    training = Training(held_out=0.9, early_stopping=1)
    with pytest.raises(ConfigError, match="leaves no training samples of the 2 of task 1"):
        fit(TensorScenario([(pair, pair)]), SGD(), training=training)
