"""SIGTERM and Ctrl-C save and end with their status; the same command resumes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from forgetless import OGD, fit
from forgetless.data import Scenario
from forgetless.support import signals
from forgetless.trace.checkpoint import Store
from forgetless.training.learner import Learner
from tests.conftest import blobs

from .problems import TRAINING, assert_same, small_run

STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}
WORDS = {signal.SIGTERM: "stopped by SIGTERM", signal.SIGINT: "interrupted"}
RUN = ["run", "rotated-digits", "--method", "a-gem", "--tasks", "30", "--epochs", "3", "--json"]


def command(arguments) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-m", "forgetless", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize("number", STATUS)
def test_the_command_saves_and_ends_with_the_signals_status(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = command(RUN)
    folder = tmp_path / "runs" / "rotated-digits-a-gem"
    deadline = time.monotonic() + 120
    while not (folder / "trace.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    started = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - started < 30  # seconds; the machine may be busy
    assert process.returncode == STATUS[number]
    assert (out, err.count("\n")) == ("", 1)
    assert f"forgetless: {WORDS[number]}; the same command resumes" in err
    assert json.loads((folder / "trace.json").read_text())["status"] == "interrupted"
    steps = Store(folder / "checkpoint").manifest()["learner"]["steps"]
    assert steps > 0
    assert not (folder / ".lock").exists()


class Signalling(Scenario):
    """Tasks whose making, of the second one, is when a signal comes."""

    def __init__(self) -> None:
        self.inner = blobs(tasks=3)
        for name in ("name", "setting", "n_tasks", "input_shape", "n_outputs"):
            setattr(self, name, getattr(self.inner, name))
        self.armed = False

    def task(self, index, seeds):
        if self.armed and index == 1:
            self.armed = False
            interrupt()
        return self.inner.task(index, seeds)

    def classes(self, index):
        return self.inner.classes(index)


def interrupt() -> None:
    """Ctrl-C, and more time than a saved run needs to notice it."""
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):
        time.sleep(0.001)


@pytest.mark.parametrize("part", ["_step", "consolidate", "accuracy"])
def test_whatever_it_is_at_it_is_saved(part, monkeypatch, tmp_path):
    """In a step, in the middle of a consolidation, and in an evaluation."""
    expected, plain, calls = small_run(None), getattr(Learner, part), [0]

    def signalled(self, *args):
        calls[0] += 1
        result = plain(self, *args)
        if calls[0] == 2:
            interrupt()
        return result

    monkeypatch.setattr(Learner, part, signalled)
    options = {"checkpoint_every": 60.0}
    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "a", **options)
    manifest = Store(tmp_path / "a" / "checkpoint").manifest()
    task = 0 if part == "_step" else 1
    assert manifest["position"]["task"] == task
    assert manifest["position"]["consolidated"] == (part == "accuracy")
    assert manifest["learner"]["steps"] == {"_step": 2, "consolidate": 18, "accuracy": 18}[part]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same(small_run(tmp_path / "a", **options), expected)


def test_while_data_are_prepared(tmp_path):
    expected, tasks = small_run(None, tasks=Signalling()), Signalling()
    tasks.armed = True
    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "a", tasks=tasks)
    assert Store(tmp_path / "a" / "checkpoint").manifest()["position"]["task"] == 1
    found = small_run(tmp_path / "a", tasks=tasks)
    assert_same(found, expected)


def test_a_second_signal_does_not_wait():
    with signals.watched(signal.SIGINT), signals.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.pending() == signal.SIGINT
        with pytest.raises(signals.Stopped):
            os.kill(os.getpid(), signal.SIGINT)
    assert signals.pending() is None


def test_others_handlers_are_left_alone(tmp_path):
    mine = lambda number, frame: None  # noqa: E731
    before = signal.signal(signal.SIGINT, mine)
    try:
        small_run(tmp_path / "a", seeds=1)
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_a_thread_that_gets_no_signals(tmp_path):
    done = []

    def learn():
        with suppress(Exception):
            done.append(fit(blobs(), OGD(3), training=TRAINING, out=tmp_path / "a").status)

    thread = threading.Thread(target=learn)
    thread.start()
    thread.join()
    assert done == ["complete"]
