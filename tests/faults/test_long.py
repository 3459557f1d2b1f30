"""Many tasks: what is remembered stays as large and as orthonormal as foretold."""

import gc
from itertools import pairwise

import pytest
import torch

from forgetless import OGD, PCAOGD, SGD, Training, fit
from forgetless.subspace import STORAGES
from forgetless.subspace.storage import Footprint
from forgetless.training.fit import few_features
from forgetless.training.learner import Learner
from tests.conftest import blobs

TASKS = 30
TRAINING = Training(lr=0.05, epochs=1, batch_size=12)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3))


@pytest.mark.parametrize("storage", ["dense", "factored"])
@pytest.mark.parametrize("method", [OGD(4), PCAOGD(4, 8)], ids=lambda m: m.name)
def test_directions_stay_orthonormal_and_as_large_as_foretold(method, storage, monkeypatch):
    states, plain = [], Learner.consolidate

    def consolidate(self, split, task):
        plain(self, split, task)
        states.append((self.state.nbytes, few_features(self, split)))
        states[:-1] = [(size, None) for size, _ in states[:-1]]

    monkeypatch.setattr(Learner, "consolidate", consolidate)
    training = Training(lr=0.05, epochs=1, batch_size=12, storage=storage)
    trace = fit(blobs(tasks=TASKS), method, network, training=training)
    memory = trace.state(0)
    if storage == "dense":
        rows = memory["directions"].double()
        assert (rows @ rows.T - torch.eye(len(rows))).abs().max() <= 1e-4
    needs = Footprint.of(states[-1][1], method.demand(), tasks=TASKS)
    assert states[-1][0] <= needs.bytes(STORAGES[storage])
    if storage == "dense":  # as many directions as were asked for, so not less either
        assert states[-1][0] == needs.bytes(STORAGES[storage])


def test_nothing_is_left_behind_by_a_task(monkeypatch):
    """Tensors that are alive: a test set more for every task, and nothing else."""
    alive, plain = [], Learner.consolidate

    def consolidate(self, split, task):
        plain(self, split, task)
        gc.collect()
        alive.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))

    monkeypatch.setattr(Learner, "consolidate", consolidate)
    tasks = blobs(tasks=TASKS)
    fit(tasks, SGD(), network, training=TRAINING, keep="nothing")
    assert max(b - a for a, b in pairwise(alive[5:])) <= 2
