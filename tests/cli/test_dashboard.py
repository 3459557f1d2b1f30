"""The dashboard of a run, and the option that adds loggers to it."""

import io

import pytest
from rich.console import Console

from forgetless import Progress
from forgetless.cli import main
from forgetless.cli.progress import Dashboard

NAN = float("nan")


def terminal(width: int = 80, *, interactive: bool = True) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=interactive, width=width, height=20, color_system=None
    )


def seen(dashboard: Dashboard, width: int = 80) -> list[str]:
    """What the dashboard shows now, line by line."""
    paper = Console(file=io.StringIO(), width=width)
    paper.print(dashboard._live.renderable)
    return paper.file.getvalue().splitlines()


def test_the_matrix_fills_in_with_the_mean_of_the_seeds():
    with Dashboard("digits sgd", terminal()) as board:
        board(Progress((0,), 1, 3, 2, 2, 0.1, 90.0, [[90.0, NAN, NAN]]))
        board(Progress((0,), 2, 3, 1, 2, 0.2, 90.0, [[NAN, NAN, NAN]]))  # not evaluated yet
        board(Progress((0,), 2, 3, 2, 2, 0.3, 70.0, [[60.0, 80.0, NAN]]))
        rows = [line.split() for line in seen(board) if line.strip().startswith("task")]
        assert rows == [["task", "1", "90"], ["task", "2", "60", "80"]]
        board(Progress((1,), 1, 3, 2, 2, 0.6, 94.0, [[94.0, NAN, NAN]]))
        assert ["task", "1", "92"] in [line.split() for line in seen(board)]
        assert "seed 1 task 1/3 epoch 2/2 accuracy 94.0" in seen(board)[-1]
    assert not any("task 2 " in line for line in seen(board))  # the bar stays, the matrix goes


def test_a_narrow_terminal_shows_the_oldest_tasks_and_the_latest_rows():
    with Dashboard("digits sgd", terminal(50)) as board:
        for t in range(30):
            row = [50.0 + s if s <= t else NAN for s in range(30)]
            board(Progress((0,), t + 1, 30, 1, 1, (t + 1) / 30, 60.0, [row]))
        lines = [line for line in seen(board, 50) if line.strip().startswith("task")]
        assert len(lines) == 14
        assert lines[-1].split()[:4] == ["task", "30", "50", "51"]
        assert max(map(len, lines)) <= 50


def test_nothing_is_drawn_where_there_is_no_terminal():
    console = terminal(interactive=False)
    with Dashboard("digits sgd", console) as board:
        board(Progress((0,), 1, 1, 1, 1, 1.0, 90.0, [[90.0]]))
    assert console.file.getvalue() == ""


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
