"""One folder, one writer."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from forgetless import TraceError
from forgetless.support import files as lock
from forgetless.support.files import LOCK, FolderLock, is_locked

from .problems import small_run

HOLD = """
import sys, time
from pathlib import Path
from forgetless.support.files import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "a")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_by_name_until_the_first_is_dead(holder, tmp_path):
    sentence = f"is being written by process {holder.pid} on {socket.gethostname()}; wait for it"
    assert is_locked(tmp_path / "a")
    before = (tmp_path / "a" / LOCK).read_bytes()
    with pytest.raises(TraceError, match=sentence):
        small_run(tmp_path / "a")
    assert (tmp_path / "a" / LOCK).read_bytes() == before
    holder.kill()
    holder.wait()
    assert not is_locked(tmp_path / "a")
    assert small_run(tmp_path / "a").status == "complete"
    assert not (tmp_path / "a" / LOCK).exists()


def test_within_a_process_too(tmp_path):
    sentence = f"by process {os.getpid()}"
    with FolderLock(tmp_path / "a"), pytest.raises(TraceError, match=sentence):
        small_run(tmp_path / "a")
    assert not (tmp_path / "a").exists()


class NoLocks:
    """A file system that knows no locks."""

    LOCK_EX = LOCK_NB = 0

    @staticmethod
    def flock(handle, how):
        raise OSError(95, "Operation not supported")


@pytest.mark.parametrize("system", [None, NoLocks], ids=["no module", "no support"])
def test_where_the_system_has_no_locks_the_file_is_one(system, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "fcntl", system)
    with FolderLock(tmp_path / "a"), pytest.raises(TraceError, match="is being written by process"):
        small_run(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    owner = {"pid": gone.pid, "host": socket.gethostname()}
    (tmp_path / "a" / LOCK).write_text(json.dumps(owner))
    assert small_run(tmp_path / "a", seeds=1).status == "complete"


def test_elsewhere_nobody_knows_whether_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "fcntl", None)
    Path(tmp_path / LOCK).write_text(json.dumps({"pid": 1, "host": "far away"}))
    with pytest.raises(TraceError, match="process 1 on far away"), FolderLock(tmp_path):
        pass
    assert (tmp_path / LOCK).exists()


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"pid": "x", "host": 3}', b"[" * 5000])
def test_a_lock_that_says_nothing_sensible(content, tmp_path):
    (tmp_path / LOCK).write_bytes(content)
    with FolderLock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
