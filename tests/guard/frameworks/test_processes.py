"""The callbacks in several processes: the task is the same as in one."""

import torch
from safetensors.torch import load_file

from tests.guard.distributed.worlds import world
from tests.guard.frameworks.works import FRAMEWORKS, two_tasks_each


def test_several_processes_store_what_one_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    two_tasks_each(0, one)
    world(2, two, two_tasks_each)
    for name in FRAMEWORKS:
        alone, together = (load_file(folder / name / "found.safetensors") for folder in (one, two))
        assert float((alone["after"] - alone["before"]).norm()) > 0.1
        for when in ("before", "after"):
            torch.testing.assert_close(together[when], alone[when], rtol=0, atol=1e-5)
