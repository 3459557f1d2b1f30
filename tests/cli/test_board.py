"""What is seen of many jobs."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from forgetless.cli.board import Board
from forgetless.launch.engines import Event, Job
from forgetless.training.settings import Progress
from tests.launch.engines.problems import order


def progress(done: float, task: int = 1, epoch: int = 1) -> Progress:
    return Progress((0,), task, 3, epoch, 2, done, None, [[0.0]])


@pytest.fixture
def jobs():
    run = order(Path("runs/ogd"))
    return [Job(run, (seed,), Path(f"runs/ogd/jobs/seeds-{seed}")) for seed in (0, 1)]


def shown(jobs, *, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=150, color_system=None)
    with Board(console) as board:
        for job in jobs:
            board(Event("queued", job))
        board(Event("begun", jobs[0], "worker 1"))
        board(Event("begun", jobs[1], "worker 2"))
        board(Event("progress", jobs[0], "worker 1", progress(0.5, 2, 1)))
        board(Event("retried", jobs[1], "worker 2", words="its process died"))
        board(Event("begun", jobs[1], "worker 2"))
        board(Event("finished", jobs[0], "worker 1"))
        board(Event("failed", jobs[1], "worker 2", words="it broke"))
    return out.getvalue()


def test_elsewhere_a_line_for_each_event(jobs):
    lines = shown(jobs, terminal=False).splitlines()
    assert lines[:2] == [
        "rotated-digits ogd seed 0 begins on worker 1",
        "rotated-digits ogd seed 1 begins on worker 2",
    ]
    assert lines[2] == "rotated-digits ogd seed 1 on worker 2: its process died"
    assert lines[3] == lines[1]
    assert lines[4].startswith("rotated-digits ogd seed 0 finished on worker 1 in 0 s; 1 of 2 jobs")
    assert lines[4].endswith("0 s so far, about 0 s left")
    assert lines[5:] == ["rotated-digits ogd seed 1 failed: it broke"]


def test_on_a_terminal_a_row_for_each_worker(jobs):
    console = Console(file=io.StringIO(), force_terminal=True, width=150, color_system=None)
    with Board(console) as board:
        for job in jobs:
            board(Event("queued", job))
        board(Event("begun", jobs[0], "worker 1"))
        board(Event("progress", jobs[0], "worker 1", progress(0.5, 2, 1)))
        rows = {task.description: task for task in board._bars.tasks}
        assert rows.keys() == {"all", "worker 1"}
        assert rows["all"].fields["where"].startswith("0 of 2 jobs")
        assert rows["all"].percentage == 25
        assert rows["worker 1"].fields["where"] == "rotated-digits ogd seed 0 task 2/3 epoch 1/2"
        assert rows["worker 1"].percentage == 50
        board(Event("finished", jobs[0], "worker 1"))
        assert [task.description for task in board._bars.tasks] == ["all"]
    assert "begins" not in shown(jobs, terminal=True)


def test_what_was_done_before_is_not_counted_in_the_time_left(jobs, monkeypatch):
    """A job goes on at four fifths: a twentieth in ten seconds is what this command does."""
    now = [0.0]
    monkeypatch.setattr("forgetless.cli.board.time.monotonic", lambda: now[0])
    board = Board(Console(file=io.StringIO(), force_terminal=False))
    board(Event("queued", jobs[0]))
    board(Event("begun", jobs[0], "worker 1"))
    now[0] = 10.0
    board(Event("progress", jobs[0], "worker 1", progress(0.8)))
    now[0] = 20.0
    board(Event("progress", jobs[0], "worker 1", progress(0.85)))
    assert board._left_words() == ", 20 s so far, about 60 s left"


def test_another_round_begins_at_nothing(jobs):
    out = io.StringIO()
    board = Board(Console(file=out, force_terminal=False, width=150))
    for job in jobs:
        board(Event("queued", job))
        board(Event("begun", job, "worker 1"))
        board(Event("finished", job, "worker 1"))
    assert out.getvalue().splitlines()[-1].endswith("; 1 of 1 jobs done, 0 s in all")
