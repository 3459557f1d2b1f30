"""The callbacks in several processes: the task is the same as in one."""

import torch
from safetensors.torch import load_file

from forgetless.guard.frameworks.base import GuardCarrier
from tests.guard.distributed.worlds import world
from tests.guard.frameworks.common import network
from tests.guard.frameworks.works import FRAMEWORKS, METHOD, two_tasks_each


def test_several_processes_store_what_one_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    two_tasks_each(0, one)
    world(2, two, two_tasks_each)
    for name in FRAMEWORKS:
        alone, together = (load_file(folder / name / "found.safetensors") for folder in (one, two))
        assert float((alone["after"] - alone["before"]).norm()) > 0.1
        for when in ("before", "after"):
            torch.testing.assert_close(together[when], alone[when], rtol=0, atol=1e-5)
    alone, together = (loaded(folder / "sharded") for folder in (one, two))
    torch.testing.assert_close(together @ alone.T @ alone, together, rtol=0, atol=1e-5)


def loaded(folder):
    """The directions that one process reads from a callback's file."""
    carrier, model = GuardCarrier(METHOD, {}), network()
    carrier.load(folder)
    carrier._attach(model, torch.optim.SGD(model.parameters()))
    directions = carrier.guard.state_dict()["memory.directions"]
    assert directions.shape == (10, 83)
    return directions
