"""A new method is one file and one line: its class, and its entry in METHODS."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from forgetless import Method, load_trace
from forgetless.cli import main
from forgetless.methods import METHODS
from forgetless.support.validation import option, real


@dataclass(frozen=True)
class Shrink(Method[None]):
    """Shorter steps from the second task on."""

    name: ClassVar[str] = "shrink"
    label: ClassVar[str] = "Shrink"
    summary: ClassVar[str] = "shorter steps"
    acts_on = "gradient"
    factor: float = option(0.5, "Length of a step.", accepted=real(0), setting="shrink_factor")

    def init(self, view):
        return None

    def update(self, g, state, view):
        return (self.factor if view.task else 1.0) * g, None

    def consolidate(self, state, view, task):
        return None


QUICK = ("--tasks", "2", "--epochs", "1", "--train-per-class", "10")


@pytest.fixture
def forgetless(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(METHODS, Shrink.name, Shrink)  # the one line
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main(list(arguments))
        return stopped.value.code, *capsys.readouterr()

    return run


def test_it_is_listed(forgetless):
    assert "shorter steps" in forgetless("list")[1]


def test_its_option_reaches_it_from_the_command_line(tmp_path):
    # In a process of its own: options are made from METHODS when the command is first loaded.
    script = """
import sys
from forgetless.cli import main
from forgetless.methods import METHODS
from tests.methods.test_new_method import Shrink
METHODS[Shrink.name] = Shrink
main(sys.argv[1:])
"""
    run = ["run", "rotated-digits", "--method", "shrink", "--shrink-factor", "0.25", *QUICK]
    command = [sys.executable, "-c", script, *run, "--json", "--out", str(tmp_path / "run")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["config"]["shrink_factor"] == 0.25
    assert load_trace(tmp_path / "run").config["shrink_factor"] == 0.25


def test_it_is_compared_and_reported(forgetless, tmp_path):
    compare = ("compare", "rotated-digits", "--methods", "sgd,shrink", *QUICK, "--out", "runs/two")
    status, out, _ = forgetless(*compare)
    assert status == 0
    assert "shrink" in out.lower()
    assert "shrink" in (tmp_path / "runs" / "two" / "report.html").read_text("utf-8").lower()
