"""What becomes of jobs that end badly, and what workers are given to work with."""

import pytest
import torch

from forgetless.launch.engines import Processes, processes
from forgetless.launch.engines.attempts import RETRIES, Attempts
from forgetless.launch.engines.division import divided
from forgetless.launch.engines.inprocess import InProcess
from forgetless.launch.engines.worker import STOPPED, error_of
from forgetless.support.errors import (
    ForgetlessError,
    MemoryShortageError,
    TrainingError,
    WorkerError,
)
from forgetless.training.settings import Progress

from .problems import Events, order


@pytest.fixture
def job(tmp_path):
    return divided(order(tmp_path, fresh=True), InProcess())[0]


PROGRESS = Progress((0,), 1, 3, 1, 2, 0.1, None, [[0.0]])


def test_a_job_is_tried_a_few_times_and_then_named(job):
    events = Events()
    attempts = Attempts([job], events, 2)
    for _ in range(RETRIES):
        assert attempts.over(attempts.next(), "worker 1", STOPPED) is None
    outcome = attempts.over(attempts.next(), "worker 1", STOPPED)
    assert isinstance(outcome.error, WorkerError)
    assert f"died {RETRIES + 1} times" in str(outcome.error)
    assert events.kinds() == ["retried"] * RETRIES + ["failed"]
    assert not attempts.waiting


def test_what_was_there_is_replaced_once(job):
    """An attempt that came to say something has replaced it; the next one goes on from that."""
    attempts = Attempts([job], Events(), 2)
    assert attempts.next().fresh
    attempts.over(job, "worker 1", STOPPED)
    again = attempts.next()
    assert again.fresh
    attempts.progress(again, "worker 1", PROGRESS)
    attempts.over(again, "worker 1", STOPPED)
    assert not attempts.next().fresh


def test_what_would_come_again_is_not_tried_again(job):
    attempts = Attempts([job], Events(), 2)
    outcome = attempts.over(attempts.next(), "worker 1", ("TrainingError", "it diverged"))
    assert type(outcome.error) is TrainingError
    assert str(outcome.error) == "it diverged"


@pytest.mark.parametrize(("workers", "said"), [(1, "no room"), (3, "no room; 3 jobs share it")])
def test_where_several_share_memory_fewer_jobs_are_a_way_out(workers, said, job):
    attempts = Attempts([job], Events(), workers)
    outcome = attempts.over(attempts.next(), "worker 1", ("MemoryShortageError", "no room"))
    assert type(outcome.error) is MemoryShortageError
    assert str(outcome.error).startswith(said)
    assert ("fewer --jobs" in str(outcome.error)) == (workers > 1)


def test_an_error_of_a_name_that_nobody_knows_is_still_one():
    assert error_of(None) is None
    assert type(error_of(("Surprise", "what"))) is ForgetlessError
    assert type(error_of(("require", "what"))) is ForgetlessError


@pytest.mark.parametrize(
    ("device", "visible", "count", "expected"),
    [
        ("cuda", None, 2, ["0", "1", "0"]),
        ("auto", "3,5", 2, ["3", "5", "3"]),
        ("cuda", None, 1, [None] * 3),
        ("cuda:1", None, 2, [None] * 3),
        ("cpu", None, 2, [None] * 3),
    ],
)
def test_several_gpus_are_dealt_out(device, visible, count, expected, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(processes, "Slot", lambda n, threads, gpu: given.append((threads, gpu)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    jobs = [
        divided(order(tmp_path / str(n), "sgd", "1", device=device), InProcess())[0]
        for n in range(4)
    ]
    Processes(3)._slots(jobs)
    assert [gpu for _, gpu in given] == expected
    assert [threads for threads, _ in given] == [2, 2, 2]
