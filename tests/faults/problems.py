"""A small run, and ways to stop it half way in the same process."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from forgetless import OGD, Training, fit, load_trace
from forgetless.training.learner import Learner
from tests.conftest import blobs

from .server import EVERY_STEP

TRAINING = Training(lr=0.05, epochs=3, batch_size=8)


class PulledPlug(Exception):
    """Stands for whatever ends a process without asking it."""


@dataclass
class Plug:
    """Ends runs after a number of training steps."""

    monkeypatch: object
    steps: int = 0
    _plain: object = field(default=Learner._step)

    def after(self, steps: int) -> None:
        plain, left = self._plain, [steps]

        def step(learner, *args):
            if left[0] == 0:
                raise PulledPlug
            left[0] -= 1
            return plain(learner, *args)

        self.monkeypatch.setattr(Learner, "_step", step)

    def never(self) -> None:
        self.monkeypatch.setattr(Learner, "_step", self._plain)


def small_run(out, method=None, model=None, tasks=None, **options):
    """Two seeds through three tasks, a checkpoint after every step."""
    options = {"training": TRAINING, "seeds": 2, "checkpoint_every": EVERY_STEP, **options}
    return fit(tasks or blobs(tasks=3), method or OGD(samples=4), model, out=out, **options)


def stopped_run(out, plug: Plug, steps: int, **options) -> None:
    """The same, ended after so many steps."""
    plug.after(steps)
    try:
        small_run(out, **options)
    except PulledPlug:
        return
    finally:
        plug.never()
    raise AssertionError("the run was done before it was to be stopped")


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def assert_same(found, expected) -> None:
    """Two traces are the same bit for bit, timings apart."""
    found = load_trace(found) if not hasattr(found, "accuracy") else found
    assert found.status == "complete"
    np.testing.assert_array_equal(found.accuracy, expected.accuracy)
    assert found.tasks == expected.tasks
    assert found.config == expected.config
    for seed in expected.seeds:
        for task in range(len(expected.tasks)):
            _assert_equal(found.weights(seed, task), expected.weights(seed, task))
        _assert_equal(found.state(seed), expected.state(seed))


def _assert_equal(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
