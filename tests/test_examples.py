"""Every example runs, and what it asserts of itself holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# They need pretrained models.
DOWNLOADED = {"keep_a_language_model.py", "pretrained_backbone.py"}
SCRIPTS = sorted({file.name for file in EXAMPLES.glob("[!_]*.py")} - DOWNLOADED)


@pytest.mark.parametrize("name", SCRIPTS)
def test_runs(name: str):
    # The tests run in several processes; one thread each keeps them from fighting over cores.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_can_be_read_in_a_sitting():
    for file in EXAMPLES.glob("*.py"):
        most = 300 if file.name == "own_methods.py" else 120  # four methods
        assert len(file.read_text().splitlines()) <= most, f"{file.name} is too long"
