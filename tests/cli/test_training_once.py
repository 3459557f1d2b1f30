"""What `forgetless compare` does once: the state of a run, its method, the report."""

from collections import Counter

import pytest

from forgetless.cli import main
from forgetless.cli import training as command
from forgetless.launch import runs
from forgetless.launch.engines import jobs
from forgetless.methods import Method
from forgetless.training.learner import Learner

COMPARE = ["compare", "rotated-digits", "--methods", "sgd,ogd", "--tasks", "2", "--epochs", "1"]
COMPARE += ["--train-per-class", "5", "--memory", "3", "--no-analyse", "--out", "a", "--json"]


@pytest.fixture
def calls(monkeypatch, elsewhere):
    """How often each was called since the last `clear`."""
    found = Counter()

    def count(owner, name, key=lambda *args: ""):
        plain = getattr(owner, name)

        def counted(*args, **more):
            found[f"{name} {key(*args)}".strip()] += 1
            return plain(*args, **more)

        monkeypatch.setattr(owner, name, counted)

    # The page makes the presets of the commands that it suggests, which are not the runs.
    monkeypatch.setattr(command, "make_report", lambda *arguments, **options: [])
    count(command, "make_report")
    for module in (runs, jobs):
        count(module, "run_status", lambda folder, *more: folder.name)
    count(Method, "__post_init__", lambda method: method.name)
    return found


def run(*options):
    with pytest.raises(SystemExit) as stopped:
        main([*COMPARE, *options])
    return stopped.value.code


def test_nothing_is_asked_or_made_twice(calls, monkeypatch):
    once = {"make_report": 1, "__post_init__ sgd": 1, "__post_init__ ogd": 1}
    states = {"run_status sgd": 1, "run_status ogd": 1}
    plain, left = Learner.consolidate, [3]

    def consolidate(self, *arguments):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return plain(self, *arguments)

    monkeypatch.setattr(Learner, "consolidate", consolidate)
    assert run() == 130  # sgd is complete, ogd unfinished; the folder was empty
    assert calls == once
    calls.clear()
    assert run() == 0
    assert calls == once | states
    calls.clear()
    assert run("--resume") == 0
    assert calls == once | states
    calls.clear()
    assert run("--overwrite") == 0
    assert calls == once
