"""Running statistics of batch norm, which the guard freezes if asked to."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, cross_entropy

from forgetless import AGEM, OGD, Guard

from .problems import CLASSES, INPUTS, seeded, task


def network() -> nn.Sequential:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(INPUTS, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, CLASSES)
        )
    )


def learn(model, optimizer, number: int, steps: int = 20) -> None:
    """A loop that calls `train()` before every step, on data far from those of task 0."""
    x, y = task(number, n=64)
    for _ in range(steps):
        model.train()
        optimizer.zero_grad()
        cross_entropy(model(x * (1 + number) + number), y).backward()
        optimizer.step()


def after_first_task(method=None, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer, method or OGD(64), output=lambda out, y: out, **options)
    learn(model, optimizer, 0)
    guard.end_task(task(0, n=64))
    return model, optimizer, guard


def drift(**options) -> float:
    """How much the first task's outputs change while the second is learned, all being protected."""
    model, optimizer, _ = after_first_task(**options)
    x, _ = task(0, n=64)
    before = model.eval()(x).detach()
    learn(model, optimizer, 1)
    return float((model.eval()(x) - before).detach().abs().max())


def test_statistics_drift_unless_they_are_frozen():
    assert drift() > 0.1
    assert drift(freeze_batch_norm=True) < 1e-4


def test_training_normalises_by_the_stored_statistics():
    model, optimizer, _ = after_first_task(freeze_batch_norm=True)
    norm = model[1]
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    learn(model, optimizer, 1)
    assert torch.equal(norm.running_mean, mean)
    assert torch.equal(norm.running_var, variance)
    x = torch.randn(7, 9)
    model.train()
    expected = batch_norm(x, mean, variance, norm.weight, norm.bias, eps=norm.eps)
    torch.testing.assert_close(norm(x), expected)


def test_nothing_is_frozen_before_the_first_task_and_after_remove():
    model, optimizer, guard = after_first_task(freeze_batch_norm=True)
    assert int(model[1].num_batches_tracked) == 20
    learn(model, optimizer, 1)
    assert int(model[1].num_batches_tracked) == 20
    model.train()
    guard.remove()
    assert model[1].training
    assert "train" not in vars(model[1])
    learn(model, optimizer, 1)
    assert int(model[1].num_batches_tracked) == 40
    guard.attach(optimizer)
    learn(model, optimizer, 1)
    assert int(model[1].num_batches_tracked) == 40


def test_a_loaded_state_freezes():
    model, optimizer, guard = after_first_task(freeze_batch_norm=True)
    guard.remove()
    other = Guard(model, optimizer, OGD(64), output=lambda out, y: out, freeze_batch_norm=True)
    count = int(model[1].num_batches_tracked)
    other.load_state_dict(guard.state_dict())
    learn(model, optimizer, 1)
    assert int(model[1].num_batches_tracked) == count


def test_what_the_user_froze_is_left_alone():
    model = network().train()
    model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer, OGD(4), freeze_batch_norm=True)
    guard.end_task(task(0))
    guard.remove()
    assert not model[1].training
    assert model[0].training


def test_gradients_on_stored_samples_do_not_change_it():
    model, optimizer, _ = after_first_task(AGEM(8), freeze_batch_norm=True)
    before = model[1].running_mean.clone()
    learn(model, optimizer, 1)
    assert torch.equal(model[1].running_mean, before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_the_model_can_still_be_copied(copied):
    model, *_ = after_first_task(freeze_batch_norm=True)
    other = copied(model).train()
    assert not other[1].training
    assert other[1].train(False) is other[1]
    x, _ = task(0)
    torch.testing.assert_close(other(x), model.eval()(x))


def test_a_compiled_model():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    guard = Guard(compiled, optimizer, OGD(5), freeze_batch_norm=True)
    learn(compiled, optimizer, 0, steps=2)
    guard.end_task(task(0))
    learn(compiled, optimizer, 1, steps=2)
    assert int(model[1].num_batches_tracked) == 2
