"""The numbers of a guard over its steps, and the loggers that are told of them."""

import json
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy

from forgetless import OGD, ConfigError, Guard, KronEWC
from forgetless.guard.history import History
from forgetless.report.loggers import MLflowLogger, TensorBoardLogger, WandbLogger

from .problems import CLASSES, mlp, task


class Noted:
    """A logger of one's own."""

    def __init__(self):
        self.told = []

    def log(self, step, numbers):
        self.told.append((step, dict(numbers)))


def trained(
    steps: int = 60, tasks: int = 2, method=None, lr: float = 0.05, *, contradict=False, **options
) -> Guard:
    """A guard after several tasks of so many steps; they may give other labels to one input."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    guard = Guard(model, optimizer, method or OGD(samples=8), **options)
    for number in range(tasks):
        x, y = task(0 if contradict else number)
        y = (y + contradict * number) % CLASSES
        for _ in range(steps):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        guard.end_task((x, y))
    return guard


def test_every_moment_is_logged_once_with_what_metrics_said():
    logger = Noted()
    guard = trained(log=logger)
    steps = [step for step, _ in logger.told]
    assert steps == sorted(steps)
    assert min(steps) > 60, "the first task has nothing to tell"
    assert [(m.step, dict(m.numbers)) for m in guard._history.moments] == logger.told
    final = guard.metrics()  # of the finished task, until the next step
    assert logger.told[-1] == (120, final)
    assert {"removed", "blocked", "drift/task 1", "loss/task 1"} <= final.keys()


def test_drift_is_noted_where_it_was_measured_alone():
    guard = trained(steps=250)
    with_drift = [m.step for m in guard._history.moments if "drift/task 1" in m.numbers]
    assert with_drift == [350, 450, 500]  # after 100 and 200 steps, and at the end


def test_moments_stay_few_and_spread_over_the_steps():
    history = History()
    for step in range(1, 20_001):
        if history.is_due(step):
            history.add(step, 1, {"removed": step / 20_000})
    steps = [m.step for m in history.moments]
    assert 20 <= len(steps) <= 40
    assert steps[-1] > 19_000
    gaps = [b - a for a, b in pairwise(steps)]
    assert max(gaps) <= 2 * min(gaps)
    history.store(20_000, 1)
    assert history.is_due(20), "the next task is noted as closely as the first"


def test_a_penalty_tells_its_pull_and_strength():
    logger = Noted()
    trained(method=KronEWC(samples=20), log=logger)
    assert {"pull", "strength"} <= logger.told[-1][1].keys()


def test_tensorboard_has_the_numbers_by_a_name_alone(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    guard = trained(log="tensorboard")
    moments = guard._history.moments
    guard.remove()  # which closes what it opened
    events = EventAccumulator("runs/guard-1/tensorboard").Reload()
    for name in ("removed", "blocked", "drift/task 1"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        wanted = [(m.step, m.numbers[name]) for m in moments if name in m.numbers]
        assert [step for step, _ in found] == [step for step, _ in wanted]
        assert [v for _, v in found] == pytest.approx([v for _, v in wanted], rel=1e-6)
    trained(steps=1, log="tensorboard").remove()
    assert (tmp_path / "runs/guard-2").is_dir(), "another guard has a folder of its own"


def test_mlflow_has_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = pytest.importorskip("mlflow.tracking")
    place = (tmp_path / "store").as_uri()
    with MLflowLogger(tracking_uri=place) as logger:
        guard = trained(log=logger)
    history = tracking.MlflowClient(place).get_metric_history(logger.run_id, "removed")
    assert [(m.step, m.value) for m in history] == [
        (m.step, m.numbers["removed"]) for m in guard._history.moments
    ]


def test_wandb_has_the_numbers_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with WandbLogger(folder=tmp_path, step="step") as logger:
        guard = trained(log=logger)
        last = dict(logger._run.summary)
    moment = guard._history.moments[-1]
    assert last["step"] == moment.step
    assert last["removed"] == pytest.approx(moment.numbers["removed"])
    assert list(tmp_path.rglob("*.wandb"))


def test_a_logger_of_the_user_stays_open(tmp_path):
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path)
    trained(log=logger).remove()
    logger.log(999, {"mine": 1.0})
    logger.close()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("tensorbord", "log must be one or more of .*: did you mean 'tensorboard'"),
        (3, r"log must be a name such as 'tensorboard', or a logger with a method log"),
    ],
)
def test_another_log_is_rejected(log, message):
    with pytest.raises(ConfigError, match=message):
        trained(log=log)


def test_warnings_are_remembered_with_their_step():
    with pytest.warns(UserWarning, match="is being forgotten") as caught:
        guard = trained(steps=150, method=OGD(samples=1), lr=0.5, contradict=True)
    ((step, text),) = guard._history.warnings[:1]
    assert text == str(caught[0].message)
    assert 150 < step <= 300
    assert caught[0].filename == __file__, "at the user's line, as before"


def test_noting_changes_no_step():
    """The same weights, bit for bit, with and without a logger."""
    one, other = trained(log=Noted()), trained()
    states = [guard._model.module.state_dict() for guard in (one, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert json.dumps(one.metrics()) == json.dumps(other.metrics())
