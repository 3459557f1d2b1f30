"""What a shell shows when a word is completed, asked as bash and zsh ask."""

import os
import subprocess
import sys

import pytest

from forgetless.cli.groups import completing
from forgetless.methods import METHODS
from tests.cli.test_main import HEAVY
from tests.conftest import forgetless


def completed(*words: str, shell: str = "bash") -> list[str]:
    """The completions of the last word."""
    asked = {
        "bash": {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": " ".join(words)},
    }
    environment = os.environ | asked[shell] | {"_FORGETLESS_COMPLETE": f"complete_{shell}"}
    program = (
        "import atexit, sys; from forgetless.cli import main\n"
        f"tell = lambda: print(*(m for m in {HEAVY} if m in sys.modules), file=sys.stderr)\n"
        "atexit.register(tell); main([])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == "\n", "torch was imported"
    return done.stdout.split("\n")[:-1]


def test_commands_are_completed_by_name_without_torch():
    assert completed("forgetless", "re") == ["report"]
    assert {"run", "compare", "doctor"} < set(completed("forgetless", ""))
    assert "Write an HTML report" in "".join(completed("forgetless", "rep", shell="zsh"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "split-d"], ["split-digits"]),
        (["compare", "--methods", "sgd,pca"], ["sgd,pca-ogd"]),
        (["run", "--sched"], ["--schedule"]),
        (["run", "--schedule", "c"], ["constant", "cosine"]),
        (["data", "f"], ["fetch"]),
        (["paper", "build", "toy"], ["toy", "toy-mean"]),
    ],
)
def test_options_and_values_are_completed(words, expected, monkeypatch, capsys):
    monkeypatch.setenv("_FORGETLESS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["forgetless", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert forgetless([], capsys)[1].splitlines() == expected


def test_a_name_after_a_comma_is_completed_alone():
    complete = completing(lambda: METHODS)
    assert complete("pca") == ["pca-ogd"]
    assert complete("sgd,pca") == ["sgd,pca-ogd"]
    assert complete("sgd,") == [f"sgd,{name}" for name in METHODS]
    assert complete("none") == []


def test_the_script_for_a_shell_calls_the_command(tmp_path):
    """bash itself completes a word by it."""
    source = os.environ | {"_FORGETLESS_COMPLETE": "source_bash"}
    command = [sys.executable, "-m", "forgetless"]
    script = subprocess.run(command, env=source, capture_output=True, text=True, check=True).stdout
    program = tmp_path / "forgetless"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m forgetless "$@"\n')
    program.chmod(0o755)
    ask = (
        f"{script}\nCOMP_WORDS=(forgetless fore)\nCOMP_CWORD=1\n"
        f'_forgetless_completion {program}\necho "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout == "forecast\n"
