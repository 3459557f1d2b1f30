"""A disk that is full or cannot be written: one sentence, and what was saved stays good."""

import errno
import os
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from forgetless import TraceError, load_trace
from forgetless.support.validation import UnwritableError
from forgetless.trace.checkpoint import Store

from .problems import Plug, assert_same, small_run, stopped_run


@contextmanager
def mounted(folder: Path, options: str):
    """A file system of its own in the folder, where this process may make one."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs the right to mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(stream) -> None:
    """Write until the disk is full."""
    with suppress(OSError):
        while stream.write(bytes(512)):
            pass


@pytest.fixture
def plug(monkeypatch):
    return Plug(monkeypatch)


def test_a_disk_that_fills_up_and_is_emptied_again(plug, tmp_path):
    """Filled by another file at the same moment as a real one would be: in the middle of a run."""
    disk = tmp_path / "disk"
    disk.mkdir()
    expected = small_run(None)
    with mounted(disk, "size=8m"):
        stopped_run(disk / "a", plug, 14)
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as stream:
            fill(stream)
        before = Store(disk / "a" / "checkpoint").manifest()
        with pytest.raises(TraceError, match=r"cannot be written: .*No space left") as caught:
            small_run(disk / "a")
        assert "\n" not in str(caught.value)
        assert Store(disk / "a" / "checkpoint").manifest() == before
        filler.unlink()
        assert_same(small_run(disk / "a"), expected)


def test_a_folder_that_becomes_read_only(plug, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    expected = small_run(None)
    with mounted(disk, "size=8m"):
        stopped_run(disk / "a", plug, 14)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for folder in ("a", "new"):
            with pytest.raises(UnwritableError, match="cannot be written: Read-only file system"):
                small_run(disk / folder)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert_same(small_run(disk / "a"), expected)


FAILURES = {
    "full": errno.ENOSPC,
    "read-only": errno.EROFS,
    "quota": errno.EDQUOT,
    "broken": errno.EIO,
}


@pytest.mark.parametrize("writes", [0, 3, 20])
@pytest.mark.parametrize("failure", FAILURES)
def test_any_write_may_fail(failure, writes, tmp_path, monkeypatch):
    """The same on machines where nothing can be mounted: the operating system is played."""
    expected, left = small_run(None), [writes]
    plain = tempfile.mkstemp

    def mkstemp(*args, **options):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(FAILURES[failure], os.strerror(FAILURES[failure]))
        return plain(*args, **options)

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    with pytest.raises(UnwritableError, match="cannot be written"):
        small_run(tmp_path / "a")
    monkeypatch.setattr(tempfile, "mkstemp", plain)
    assert_same(small_run(tmp_path / "a"), expected)


def test_a_file_that_may_not_grow_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    """A write that fails half way, with part of the file on disk."""
    from safetensors import SafetensorError

    from forgetless.trace import checkpoint as store

    expected, plain, left = small_run(None), store.save_file, [9]

    def save_file(tensors, file):
        plain(tensors, file)
        left[0] -= 1
        if left[0] == 0:
            Path(file).write_bytes(Path(file).read_bytes()[:100])
            raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(store, "save_file", save_file)
    with pytest.raises(UnwritableError, match="No space left"):
        small_run(tmp_path / "a")
    assert not list((tmp_path / "a").rglob(".*"))
    assert_same(small_run(tmp_path / "a"), expected)
    assert load_trace(tmp_path / "a").status == "complete"
