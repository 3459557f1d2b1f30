"""Methods that keep directions: one way to project them out, and directions of one's own."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn, optim

from forgetless import ConfigError, Guard, Training, fit
from forgetless.methods import option
from forgetless.methods.ogd import Orthogonal
from forgetless.subspace import Record
from tests.conftest import blobs

from ..guard.problems import flat, mlp, task, train
from ..subspace.axes import Axes


def own_update(self, g, state, view):
    return 2 * state.project_out(g), state


def test_a_method_that_keeps_directions_cannot_override_update():
    """Drivers project its directions out without asking it."""
    with pytest.raises(TypeError, match=r"Twice overrides `update`.*keeps_directions = False"):
        type("Twice", (Orthogonal,), {"update": own_update})
    members = {"update": own_update, "keeps_directions": False}
    assert type("Honest", (Orthogonal,), members).update is own_update


@dataclass(frozen=True)
class Freeze(Orthogonal):
    """The largest weights after each task stay as they are."""

    name = "freeze"
    count: int = option(5, "Weights of each task that are frozen.", setting="frozen_weights")

    def init(self, view):
        none = torch.empty(len(view.theta), 0, dtype=torch.long, device=view.theta.device)
        return Axes(none, Record.empty(len(view.theta)))

    def consolidate(self, state, view, task):
        sizes = view.theta.abs().scatter(1, state.indices, -1.0)
        indices = torch.cat([state.indices, sizes.topk(self.count, 1).indices], 1)
        seeds = len(indices)
        record = state.record.with_task([self.count] * seeds, [1.0] * seeds)
        return replace(state, indices=indices, record=record)


def network():
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def run(**arguments):
    training = Training(lr=0.05, epochs=2, batch_size=8, **arguments.pop("training", {}))
    return fit(blobs(tasks=3), Freeze(), network, seeds=2, training=training, **arguments)


def frozen_in(trace, seed, task, count):
    """The first `count` frozen weights, after a task."""
    weights = torch.cat([w.flatten() for w in trace.weights(seed, task).values()])
    return weights[trace.state(seed)["indices"].long()[:count]]


def test_directions_of_ones_own_in_a_run():
    trace = run()
    for seed in (0, 1):
        assert len(trace.state(seed)["indices"].unique()) == 15
        assert torch.equal(frozen_in(trace, seed, 2, 5), frozen_in(trace, seed, 0, 5))
        assert torch.equal(frozen_in(trace, seed, 2, 10), frozen_in(trace, seed, 1, 10))
        assert not torch.equal(frozen_in(trace, seed, 1, 15), frozen_in(trace, seed, 0, 15))


def test_directions_of_ones_own_resume_bit_for_bit(tmp_path):
    whole = run()

    def stop(event):
        if event.task == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path / "run", observer=stop)
    resumed = run(out=tmp_path / "run")
    for seed in (0, 1):
        for name, value in whole.weights(seed, 2).items():
            assert torch.equal(resumed.weights(seed, 2)[name], value)


def test_directions_of_ones_own_fit_the_budget_of_a_run():
    with pytest.warns(UserWarning, match="task 3: .*12 of 15 directions kept"):
        trace = run(training={"budget": "150B"})
    assert [len(trace.state(seed)["indices"]) for seed in (0, 1)] == [12, 12]


@pytest.mark.parametrize("storage", ["bfloat16", "factored", "cpu"])
def test_a_storage_that_directions_of_ones_own_do_not_have_is_rejected(storage):
    message = "storage must be that of Axes, which has one way to store its directions, dense"
    with pytest.raises(ConfigError, match=message):
        run(training={"storage": storage})
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, Freeze(), storage=storage)
    with pytest.raises(ConfigError, match=message):
        guard.end_task(task(0))


def test_what_a_task_added_is_noted_from_lists_and_tensors(recwarn):
    empty = Record.empty(2)
    kinds = [lambda x: x, torch.tensor, lambda x: [torch.tensor(v) for v in x]]
    ranks, shares = [3, 2], [0.5, 1.0]
    for kind in kinds:
        record = empty.with_task(kind(ranks), kind(shares)).with_task(kind(ranks), kind(shares))
        assert record.ranks.tolist() == [[3, 3], [2, 2]]
        assert record.shares.tolist() == [[0.5, 0.5], [1.0, 1.0]]
        assert (record.ranks.dtype, record.shares.dtype) == (torch.long, torch.float64)
    counted = empty.with_task(torch.tensor([3.0, 2.0]), shares)  # such as a sum over a mask
    assert counted.ranks.dtype == torch.long
    assert not recwarn.list
    with pytest.raises(
        ConfigError, match=r"ranks must be 2 numbers, one for each seed, not \(1,\)"
    ):
        empty.with_task([3], shares)


@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW], ids=["sgd", "adamw"])
def test_directions_of_ones_own_in_a_guard(make):
    model = mlp()
    optimizer = make(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, Freeze(), budget="150B")
    guard.end_task(task(0))
    frozen = guard.state_dict()["memory.indices"]
    before = flat(model)
    train(model, optimizer, task(1), steps=5)
    moved = flat(model) != before
    assert not moved[frozen].any()
    assert moved.sum() > len(moved) // 2
    for parameter in list(model.parameters())[2:]:  # the other axes are restricted
        parameter.requires_grad_(False)
    train(model, optimizer, task(1), steps=2)
    assert torch.equal(flat(model)[frozen], before[frozen])
    guard.end_task(task(1))
    with pytest.warns(UserWarning, match="task 3: 12 of 15 directions kept"):
        guard.end_task(task(2))
    report = guard.memory_report()
    assert (report.storage, report.directions, report.bytes) == ("Axes", 12, 144)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    other = Guard(model, make(model.parameters(), lr=0.1), Freeze())
    other.load_state_dict(guard.state_dict())
    assert torch.equal(other.state_dict()["memory.indices"], guard.state_dict()["memory.indices"])
    assert str(other.memory_report()) == str(report)
