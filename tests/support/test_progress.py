"""A bar for what takes long, and silence for everything else."""

import io
import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest
from rich.console import Console

from forgetless.support.progress import _Bar, advance, bar_on_terminal, watched_by


def test_nobody_watches_and_nothing_is_printed(capsys):
    with bar_on_terminal("storing", patience=0.0):
        advance("moments", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_watcher_sees_what_is_done_inside_and_nothing_afterwards():
    seen = []
    with watched_by(lambda *what: seen.append(what)):
        advance("moments", 1, 2)
    advance("moments", 2, 2)
    assert seen == [("moments", 1, 2)]


@pytest.mark.parametrize(("patience", "is_shown"), [(0.0, True), (1e6, False)])
def test_a_bar_appears_only_after_some_time(patience, is_shown):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with _Bar("storing task 3", console, patience) as bar:
        bar("moments", 1, 2)
        bar("eigenvectors", 2, 2)
    assert ("storing task 3: eigenvectors" in console.file.getvalue()) == is_shown


def shown_on_a_terminal(code: str, **variables: str) -> bytes:
    """What a program writes to standard error, if that is a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=theirs, env=environment | variables
    ) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # Linux says so at the end of a terminal
            while more := os.read(ours, 4096):
                shown += more
    os.close(ours)
    assert process.returncode == 0
    return shown


IMPATIENT = """
import torch, forgetless
from forgetless.support import progress
progress.bar_on_terminal.__wrapped__.__kwdefaults__["patience"] = 0.0
from forgetless import OGD, SGD, Training, fit
tasks = forgetless.scenario("rotated-digits", tasks=2, train_per_class=4)
training = Training(epochs=1)
"""
LONG = {
    "fit": ("fit(tasks, OGD(samples=5), training=training)", b"OGD: task 2 of 2"),
    "an observer": ("fit(tasks, SGD(), training=training, observer=lambda p: None)", None),
    "forecast": (
        "model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
        "one, other = (tasks.task(t, [0]).train for t in (0, 1))\n"
        "pairs = [(s.inputs, s.labels) for s in (one, other)]\n"
        "forgetless.forecast(model, *pairs, training=training)",
        b"forecast: training a copy",
    ),
}


@pytest.mark.parametrize("what", LONG)
def test_what_may_take_long_shows_a_bar_on_a_terminal(what):
    call, expected = LONG[what]
    shown = shown_on_a_terminal(IMPATIENT + call)
    assert shown == b"" if expected is None else expected in shown


STORING = """
import torch, forgetless
from forgetless.support import progress
progress._PATIENCE = 0.0
progress.bar_on_terminal.__wrapped__.__kwdefaults__["patience"] = 0.0
model = torch.nn.Linear(3, 2)
guard = forgetless.Guard(model, torch.optim.SGD(model.parameters(), lr=1), progress=PROGRESS)
guard.end_task((torch.randn(8, 3), torch.zeros(8, dtype=torch.long)))
"""


@pytest.mark.parametrize("progress", [True, False])
@pytest.mark.parametrize("color", [True, False])
def test_a_guard_shows_a_bar_on_a_terminal_if_wanted(progress, color):
    variables = {} if color else {"NO_COLOR": "1"}
    shown = shown_on_a_terminal(STORING.replace("PROGRESS", str(progress)), **variables)
    assert (b"storing task 1: moments" in shown) == progress
    assert (b"\x1b[33m" in shown) == (progress and color)
