"""A Trainer's script under `torchrun`: the weights are those of one process, also after a kill."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.guard.frameworks import trainer_script

ROOT = Path(__file__).parents[3]


def torchrun(folder: Path, mode: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = ["-m", "tests.guard.frameworks.trainer_script", str(folder), *filter(None, [mode])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*command, *script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a script that was killed in its last training."""
    folder = tmp_path_factory.mktemp("two")
    done = torchrun(folder, "die")
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr, done.stderr
    assert (folder / trainer_script.KILLED / "killed" / "checkpoint-2").is_dir()
    return folder


@pytest.mark.parametrize("name", trainer_script.CASES)
def test_two_processes_are_one(killed, tmp_path, name):
    trainer_script.two_tasks(name, tmp_path)
    alone, together = (load_file(f / f"{name}.safetensors") for f in (tmp_path, killed))
    assert float((alone["second"] - alone["first"]).norm()) > 0.1
    # The sums of gradients are rounded differently: in bfloat16 autocast far more.
    tolerance = 2e-2 if name == "bf16" else 1e-9
    for when, expected in alone.items():
        torch.testing.assert_close(together[when], expected, rtol=0, atol=tolerance)


def test_a_killed_training_resumes_bit_for_bit(killed):
    done = torchrun(killed, "resume")
    assert done.returncode == 0, done.stderr
    whole, resumed = (
        load_file(killed / f"{trainer_script.KILLED}{mode}.safetensors")["second"]
        for mode in ("", "resume")
    )
    assert torch.equal(resumed, whole)
