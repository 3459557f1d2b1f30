"""The board of a command, and the option that adds loggers to it."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from forgetless.cli import main
from forgetless.cli.progress import Board
from forgetless.launch.engines import Event, Job
from forgetless.training.settings import Progress
from tests.launch.engines.problems import order

NAN = float("nan")


def progress(done: float, task: int = 1, epoch: int = 1) -> Progress:
    return Progress((0,), task, 3, epoch, 2, done, None, [[0.0]])


@pytest.fixture
def jobs():
    run = order(Path("runs/ogd"))
    return [Job(run, (seed,), Path(f"runs/ogd/jobs/seeds-{seed}")) for seed in (0, 1)]


def shown(jobs, *, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=150, color_system=None)
    with Board(2, console=console) as board:
        for job in jobs:
            board(Event("queued", job))
        board(Event("begun", jobs[0], "worker 1"))
        board(Event("begun", jobs[1], "worker 2"))
        board(Event("progress", jobs[0], "worker 1", progress(0.5, 2, 1)))
        board(Event("retried", jobs[1], "worker 2", message="its process died"))
        board(Event("begun", jobs[1], "worker 2"))
        board(Event("finished", jobs[0], "worker 1"))
        board(Event("failed", jobs[1], "worker 2", message="it broke"))
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
    with Board(2, console=console) as board:
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
    monkeypatch.setattr("forgetless.cli.progress.time.monotonic", lambda: now[0])
    board = Board(2, console=Console(file=io.StringIO(), force_terminal=False))
    board(Event("queued", jobs[0]))
    board(Event("begun", jobs[0], "worker 1"))
    now[0] = 10.0
    board(Event("progress", jobs[0], "worker 1", progress(0.8)))
    now[0] = 20.0
    board(Event("progress", jobs[0], "worker 1", progress(0.85)))
    assert board._time_of_jobs() == ", 20 s so far, about 60 s left"


def test_another_round_begins_at_nothing(jobs):
    out = io.StringIO()
    board = Board(2, console=Console(file=out, force_terminal=False, width=150))
    for job in jobs:
        board(Event("queued", job))
        board(Event("begun", job, "worker 1"))
        board(Event("finished", job, "worker 1"))
    assert out.getvalue().splitlines()[-1].endswith("; 1 of 1 jobs done, 0 s in all")


def terminal(width: int = 80, *, interactive: bool = True) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=interactive, width=width, height=20, color_system=None
    )


def seen(board: Board, width: int = 80) -> list[str]:
    """The lines that the board shows now."""
    paper = Console(file=io.StringIO(), width=width)
    paper.print(board._live.renderable)
    return paper.file.getvalue().splitlines()


@pytest.fixture
def alone():
    run = order(Path("runs/sgd"), "sgd")
    return Job(run, (0, 1), run.folder)


def tell(board: Board, job: Job, *measured: Progress) -> None:
    for one in measured:
        board(Event("progress", job, progress=one))


def test_the_matrix_fills_in_with_the_mean_of_the_seeds(alone):
    with Board(1, console=terminal()) as board:
        board(Event("queued", alone))
        board(Event("begun", alone))
        tell(board, alone, Progress((0,), 1, 3, 2, 2, 0.1, 90.0, [[90.0, NAN, NAN]]))
        tell(board, alone, Progress((0,), 2, 3, 1, 2, 0.2, 90.0, [[NAN, NAN, NAN]]))
        tell(board, alone, Progress((0,), 2, 3, 2, 2, 0.3, 70.0, [[60.0, 80.0, NAN]]))
        rows = [line.split() for line in seen(board) if line.strip().startswith("task")]
        assert rows == [["task", "1", "90"], ["task", "2", "60", "80"]]
        tell(board, alone, Progress((1,), 1, 3, 2, 2, 0.6, 94.0, [[94.0, NAN, NAN]]))
        assert ["task", "1", "92"] in [line.split() for line in seen(board)]
        (row,) = (task for task in board._bars.tasks if task.visible)  # no bar for all of one job
        assert row.description == "rotated-digits sgd"
        assert row.fields["where"] == "seed 1 task 1/3 epoch 2/2 accuracy 94.0"
        board(Event("finished", alone))
        assert not any("task 2 " in line for line in seen(board))  # the bar stays, the matrix goes
        assert any("rotated-digits sgd" in line for line in seen(board))


def test_a_narrow_terminal_shows_the_oldest_tasks_and_the_latest_rows(alone):
    with Board(1, console=terminal(50)) as board:
        board(Event("queued", alone))
        board(Event("begun", alone))
        for t in range(30):
            row = [50.0 + s if s <= t else NAN for s in range(30)]
            tell(board, alone, Progress((0,), t + 1, 30, 1, 1, (t + 1) / 30, 60.0, [row]))
        lines = [line for line in seen(board, 50) if line.strip().startswith("task")]
        assert len(lines) == 14
        assert lines[-1].split()[:4] == ["task", "30", "50", "51"]
        assert max(map(len, lines)) <= 50


def test_one_worker_is_silent_where_there_is_no_terminal(alone):
    console = terminal(interactive=False)
    with Board(1, console=console) as board:
        board(Event("queued", alone))
        board(Event("begun", alone))
        tell(board, alone, Progress((0,), 1, 1, 1, 1, 1.0, 90.0, [[90.0]]))
        board(Event("finished", alone))
    assert console.file.getvalue() == ""


def test_stages_that_are_not_jobs_are_a_line_with_the_time_left(monkeypatch):
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr("forgetless.cli.progress.time.monotonic", lambda: now[0])
    board = Board(1, console=Console(file=out, force_terminal=False, width=150))
    board.show_stage("training", 0.0)
    now[0] = 10.0
    board.show_stage("training on", 0.2, new=False)
    board.show_stage("more training", 0.25)
    board.show_stage("measuring")
    assert out.getvalue().splitlines() == [
        "training",
        "more training, 10 s so far, about 30 s left",
        "measuring",
    ]


def test_the_command_logs_where_it_is_told_to(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    quick = ["--tasks", "2", "--epochs", "1", "--train-per-class", "5", "--hidden", "8"]
    out = ["--out", str(tmp_path / "run"), "--json"]
    with pytest.raises(SystemExit) as stopped:
        main(["run", "rotated-digits", "--method", "sgd", *quick, *out, "--log", "tensorboard"])
    assert stopped.value.code == 0
    assert list((tmp_path / "run" / "tensorboard" / "seed-0").glob("events*"))
    with pytest.raises(SystemExit) as stopped:
        main(["run", "rotated-digits", "--method", "sgd", "--log", "paper"])
    assert stopped.value.code == 2
    assert "--log must be one or more of tensorboard, mlflow, wandb" in capsys.readouterr().err
