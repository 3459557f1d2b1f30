"""Several jobs at a time on one machine: the same traces, whatever happens to the workers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from forgetless.launch.engines import InProcess, Processes, processes
from forgetless.launch.engines.jobs import divide
from forgetless.launch.engines.processes import RETRIES, STOPPED, Attempts, error_of
from forgetless.launch.runs import status_of
from forgetless.support.validation import (
    ForgetlessError,
    ForgetlessWarning,
    MemoryShortageError,
    TrainingError,
    WorkerError,
)
from forgetless.trace.checkpoint import CHECKPOINTS, Store
from forgetless.training.settings import Progress

from .problems import Events, assert_alike, holder_of, order, trained


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The runs as one process trains them."""
    folder = tmp_path_factory.mktemp("expected")
    errors = trained([order(folder / m, m) for m in ("sgd", "ogd")])
    assert errors == {"sgd": None, "ogd": None}
    return folder


def killing(folder: Path, times: int, after: int = 2):
    """A watcher that kills who is at a job, when that has said so many things."""
    events, left, heard = Events(), [times], [0]

    def watch(event):
        events(event)
        if event.kind == "begun":
            heard[0] = 0
        heard[0] += event.progress is not None
        if event.progress is not None and heard[0] == after and left[0]:
            left[0] -= 1
            os.kill(holder_of(event.job.folder), signal.SIGKILL)

    return watch, events


def test_the_traces_are_those_of_one_process(expected, tmp_path):
    events = Events()
    orders = [order(tmp_path / m, m) for m in ("sgd", "ogd")]
    assert trained(orders, Processes(2), events) == {"sgd": None, "ogd": None}
    for method in ("sgd", "ogd"):
        assert_alike(tmp_path / method, expected / method)
    kinds = events.kinds()
    assert kinds[:4] == ["queued"] * 4
    assert (kinds.count("begun"), kinds.count("finished"), len(kinds)) == (4, 4, 12)
    assert {e.worker for e in events if e.kind == "begun"} == {"worker 1", "worker 2"}
    assert all(e.progress.tasks == 3 for e in events if e.kind == "progress")
    shares = [e.progress.done for e in events if e.progress and e.job == events[0].job]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_killed_worker_is_replaced_and_goes_on(expected, tmp_path):
    watch, events = killing(tmp_path, times=1, after=3)
    assert trained([order(tmp_path / "ogd")], Processes(1), watch) == {"ogd": None}
    assert_alike(tmp_path / "ogd", expected / "ogd")
    assert events.kinds().count("retried") == 1
    (again,) = (n for n, e in enumerate(events) if e.kind == "retried")
    first = next(e.progress for e in events[again:] if e.progress)
    assert first.done > events[again - 1].progress.done - 1e-9  # from the checkpoint, not from 0
    assert "attempt 2 resumes" in events[again].message


def test_one_that_dies_again_and_again_is_named_and_the_others_are_kept(expected, tmp_path):
    events = Events()

    def watch(event):
        events(event)
        far = event.progress is not None and event.progress.task > 1
        if far and event.job.order.folder.name == "ogd":
            os.kill(holder_of(event.job.folder), signal.SIGKILL)

    orders = [order(tmp_path / "ogd", epochs=1, tasks=8, seeds="1"), order(tmp_path / "sgd", "sgd")]
    found = trained(orders, Processes(2), watch)
    assert found["sgd"] is None
    assert isinstance(found["ogd"], WorkerError)
    assert str(found["ogd"]).startswith("rotated-digits ogd was given up")
    assert "died 3 times" in str(found["ogd"])
    assert_alike(tmp_path / "sgd", expected / "sgd")
    assert status_of(tmp_path / "ogd", orders[0].config).kind == "unfinished"
    assert trained(orders[:1]) == {"ogd": None}


def test_who_stops_asking_stops_the_workers_and_they_save(expected, tmp_path):
    orders = [order(tmp_path / "ogd"), order(tmp_path / "sgd", "sgd")]

    class Enough(Exception):
        pass

    def watch(event):
        if event.progress is not None and event.progress.done > 0.3:
            raise Enough

    with pytest.raises(Enough):
        trained(orders, Processes(2), watch)
    assert not (tmp_path / "ogd" / "trace.json").exists()
    begun = [f.parent for f in tmp_path.rglob(CHECKPOINTS)]
    assert begun
    assert all(Store(f / CHECKPOINTS).manifest() is not None for f in begun)
    # What was begun in parts goes on in parts, in one process too.
    assert trained(orders) == {"ogd": None, "sgd": None}
    for method in ("sgd", "ogd"):
        assert_alike(tmp_path / method, expected / method)


def test_what_was_begun_as_a_whole_goes_on_as_one(expected, tmp_path):
    def watch(event):
        if event.progress is not None and event.progress.done > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained([order(tmp_path / "ogd")], watch=watch)
    events = Events()
    assert trained([order(tmp_path / "ogd")], Processes(2), events) == {"ogd": None}
    assert events.kinds() == ["queued", "begun", "finished"]
    assert_alike(tmp_path / "ogd", expected / "ogd")


SCRIPT = """
import sys
from pathlib import Path
from tests.launch.engines.problems import order
from forgetless.launch.engines import Processes, train
if __name__ == "__main__":
    long = order(Path(sys.argv[1]), "ogd", "1", epochs=50, tasks=20)
    list(train([long], Processes(2), lambda event: None))
"""


def test_workers_end_when_the_command_is_killed(tmp_path):
    """Nothing can tell them; they save and leave, so that the same command can go on."""
    root = Path(__file__).parents[3]
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "a")]
    parent = subprocess.Popen(command, env=environment)
    try:
        worker = holder_of(tmp_path / "a")
        until = time.monotonic() + 60
        while not Store(tmp_path / "a" / CHECKPOINTS).exists():
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
    until = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
    assert not (tmp_path / "a" / ".lock").exists()
    assert Store(tmp_path / "a" / CHECKPOINTS).manifest() is not None


def test_a_warning_of_a_worker_is_a_warning_here(expected, tmp_path):
    def watch(event):
        if event.progress is not None and event.progress.done > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained([order(tmp_path / "ogd")], watch=watch)
    newest = max((tmp_path / "ogd" / CHECKPOINTS).glob("*progress*"))
    newest.write_bytes(newest.read_bytes()[:-5])
    with pytest.warns(ForgetlessWarning, match=r"rotated-digits ogd: .* is cut short"):
        assert trained([order(tmp_path / "ogd")], Processes(1)) == {"ogd": None}
    assert_alike(tmp_path / "ogd", expected / "ogd")


@pytest.fixture
def job(tmp_path):
    return divide(order(tmp_path, resume=False), InProcess())[0]


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
    assert attempts.next().resume is False
    attempts.over(job, "worker 1", STOPPED)
    again = attempts.next()
    assert again.resume is False
    attempts.progress(again, "worker 1", PROGRESS)
    attempts.over(again, "worker 1", STOPPED)
    assert attempts.next().resume is None


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
    monkeypatch.setattr(processes, "Worker", lambda n, threads, gpu: given.append((threads, gpu)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    jobs = [
        divide(order(tmp_path / str(n), "sgd", "1", device=device), InProcess())[0]
        for n in range(4)
    ]
    Processes(3)._start(jobs)
    assert [gpu for _, gpu in given] == expected
    assert [threads for threads, _ in given] == [2, 2, 2]
