"""Several jobs at a time on one machine: the same traces, whatever happens to the workers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forgetless.launch.engines import Processes
from forgetless.launch.runs import standing
from forgetless.support.errors import ForgetlessWarning, WorkerError
from forgetless.trace.checkpoint import CHECKPOINTS, Store

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
    assert "attempt 2 goes on" in events[again].words


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
    assert standing(tmp_path / "ogd", orders[0].config) == "unfinished"
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
