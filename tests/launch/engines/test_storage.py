"""Shared storage: a folder of several machines, and a server that is spoken to over a network."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from forgetless.cli import main
from forgetless.launch.engines import InProcess, Processes
from forgetless.launch.engines.storage import SAVED, Mirror, ObjectStore, download_state
from forgetless.launch.runs import status_of
from forgetless.paper.results import load_results
from forgetless.support.files import FolderLock, is_shared
from forgetless.support.validation import (
    ConfigError,
    ForgetlessWarning,
    TraceError,
    UnwritableError,
)
from forgetless.trace.checkpoint import CHECKPOINTS, Store, checksum

from .problems import Events, Pretended, assert_alike, order, trained


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An FTP server, and the folder that it serves."""
    folder = tmp_path_factory.mktemp("served")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["-i", "127.0.0.1", "-p", str(port), "-w", "-d", str(folder), "-u", "me", "-P", "it"]
    command = [sys.executable, "-W", "ignore", "-m", "pyftpdlib", *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.05)
        yield f"ftp://me:it@127.0.0.1:{port}", folder
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(params=["file", "ftp"])
def place(request, tmp_path):
    """An address of shared storage, and the folder behind it."""
    if request.param == "file":
        return f"file://{tmp_path}/shared", tmp_path / "shared"
    url, folder = request.getfixturevalue("server")
    return f"{url}/{tmp_path.name}", folder / tmp_path.name


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    assert trained([order(folder / "ogd")]) == {"ogd": None}
    return folder / "ogd"


def stored(here: Path, url: str, **settings):
    """A run in shared storage."""
    return replace(order(here, **settings), shared=f"{url}/ogd")


def stopping(after: float):
    def watch(event):
        if event.progress is not None and event.progress.done > after:
            raise KeyboardInterrupt

    return watch


def test_files_come_and_go(place, tmp_path):
    url, folder = place
    storage = ObjectStore(url)
    assert storage.names() == []
    (tmp_path / "one").write_bytes(b"1" * 1000)
    (tmp_path / "two").write_bytes(b"2")
    storage.put(tmp_path / "one", "a/b/one")
    storage.replace(tmp_path / "one", "a/c")
    storage.replace(tmp_path / "two", "a/c")
    storage.write("d", b"small")
    assert storage.names() == ["a/b/one", "a/c", "d"]
    assert {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()} == {
        "a/b/one", "a/c", "d",
    }  # fmt: skip
    assert (storage.read("d", 5), storage.size("a/b/one")) == (b"small", 1000)
    with pytest.raises(TraceError, match="d is larger than the 4 bytes allowed"):
        storage.read("d", 4)
    storage.within("a").get("c", tmp_path / "got" / "c")
    assert (tmp_path / "got" / "c").read_bytes() == b"2"
    storage.remove("d")
    storage.remove("d")  # gone already
    storage.remove("a/b", folder=True)
    storage.remove("a/b", folder=True)
    assert storage.names() == ["a/c"]


@pytest.mark.parametrize("engine", [InProcess(), Pretended()], ids=["whole", "in parts"])
def test_a_run_goes_on_on_another_machine(place, engine, expected, tmp_path):
    """The other machine has nothing but the storage."""
    url, folder = place
    with pytest.raises(KeyboardInterrupt):
        trained([stored(tmp_path / "one", url)], engine, stopping(0.6))
    assert not (folder / "ogd" / "trace.json").exists()
    other = stored(tmp_path / "two" / "ogd", url)
    download_state(other.shared, other.folder)
    assert status_of(other.folder, other.config).kind == "unfinished"
    changed = replace(other.config, lr=0.5)
    assert status_of(other.folder, changed).kind == "other"
    events = Events()
    assert trained([other], engine, events) == {"ogd": None}
    begun = [e.progress.done for e in events if e.progress and e.job.seeds[0] == 0]
    assert not begun or begun[0] > 0.4
    for found in (other.folder, folder / "ogd"):
        assert_alike(found, expected)
    assert sorted(f.name for f in (folder / "ogd").iterdir()) == ["seed-0", "seed-1", "trace.json"]
    # Once more, from a third: there is nothing to do.
    third, events = stored(tmp_path / "three" / "ogd", url), Events()
    download_state(third.shared, third.folder)
    assert trained([third], InProcess(), events) == {"ogd": None}
    assert not [e for e in events if e.progress]
    assert_alike(third.folder, expected)


def test_a_killed_worker_goes_on_from_the_storage(server, expected, tmp_path):
    url, folder = server[0] + "/killed", server[1] / "killed"
    events, killed = Events(), []

    def watch(event):
        events(event)
        if event.progress is not None and event.progress.task == 2 and not killed:
            killed.extend(_children_in_python())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    wanted = stored(tmp_path / "here" / "ogd", url, epochs=6)
    assert trained([stored(tmp_path / "whole" / "ogd", url + "2", epochs=6)]) == {"ogd": None}
    assert trained([wanted], Processes(1), watch) == {"ogd": None}
    assert killed
    assert events.kinds().count("retried") == 1
    assert_alike(folder / "ogd", tmp_path / "whole" / "ogd")


def _children_in_python() -> list[int]:
    """The worker processes of this one."""
    import multiprocessing

    return [p.pid for p in multiprocessing.active_children()]


@pytest.fixture
def saved(tmp_path):
    """A folder of a job that was saved twice, as a mirror of another machine finds it."""
    url = f"file://{tmp_path}/shared"
    with pytest.raises(KeyboardInterrupt):
        trained([stored(tmp_path / "one", url, seeds="1")], watch=stopping(0.6))
    folder = tmp_path / "shared" / "ogd" / SAVED
    assert len(list(folder.glob("pointer-*"))) == 2
    return folder


def fetched(folder: Path, here: Path):
    storage = ObjectStore(f"file://{folder.parent}")
    Mirror(here, storage, storage).fetch()
    return Store(here / CHECKPOINTS).manifest()


def newest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda f: f.stat().st_mtime_ns)


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("pointer-*", lambda f: f.write_bytes(f.read_bytes()[:-9])),
        ("pointer-*", lambda f: f.write_bytes(b"")),
        ("pointer-*", lambda f: f.write_bytes(f.read_bytes().replace(b"bytes", b"Bytes", 1))),
        ("*-progress.safetensors", lambda f: f.write_bytes(f.read_bytes()[:-9])),
        ("*-progress.safetensors", lambda f: f.write_bytes(f.read_bytes()[:-1] + b"?")),
        ("*-progress.safetensors", lambda f: f.unlink()),
    ],
    ids=["pointer cut", "pointer empty", "pointer changed", "file cut", "file changed", "gone"],
)
def test_what_is_damaged_is_noticed_and_the_one_before_is_taken(pattern, damage, saved, tmp_path):
    whole = fetched(saved, tmp_path / "whole")["learner"]["steps"]
    damage(newest(saved, pattern))
    with pytest.warns(ForgetlessWarning, match=r"is damaged: .* resumes from the checkpoint"):
        assert fetched(saved, tmp_path / "here")["learner"]["steps"] == whole - 1
    for file in saved.glob("pointer-*"):
        file.write_text("{}")
    with pytest.raises(TraceError, match="nothing before it can be used; --overwrite starts anew"):
        fetched(saved, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "seed-0/../../x", "a.py"])
def test_a_pointer_reaches_nothing_else(name, saved, tmp_path):
    files = {name: {"object": newest(saved, "*-manifest*").name, "bytes": 1, "blake2b": ""}}
    for file in saved.glob("pointer-*"):
        file.write_text(json.dumps({"blake2b": checksum(files), "files": files}))
    before = {f for f in tmp_path.rglob("*") if f.is_file()}
    with pytest.raises(TraceError, match="is no file of a run"):
        fetched(saved, tmp_path / "here")
    assert {f for f in tmp_path.rglob("*") if f.is_file()} == before


def test_storage_that_fails_for_a_while_does_not_stop_a_run(expected, monkeypatch, tmp_path):
    plain, calls = ObjectStore.put, [0]

    def put(self, file, name):
        calls[0] += 1
        if SAVED in name and calls[0] < 20:
            raise UnwritableError("the network is down")
        plain(self, file, name)

    monkeypatch.setattr(ObjectStore, "put", put)
    with pytest.warns(ForgetlessWarning, match="was not copied, the next one will be: the network"):
        assert trained([stored(tmp_path / "here" / "ogd", f"file://{tmp_path}/shared")]) == {
            "ogd": None
        }
    assert_alike(tmp_path / "shared" / "ogd", expected)


def test_replacing_a_run_leaves_nothing_of_it(place, tmp_path):
    url, folder = place
    assert trained([stored(tmp_path / "a", url, seeds="3")], Pretended()) == {"a": None}
    other = replace(stored(tmp_path / "b", url, seeds="1", tasks=2), resume=False)
    assert trained([other], Pretended()) == {"b": None}
    shutil.rmtree(tmp_path / "a")
    found = {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()}
    kept = {f"ogd/seed-0/{n}.safetensors" for n in ("task-01", "task-02", "memory")}
    assert found == kept | {"ogd/trace.json"}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "nonsense://x/y",
            "nonsense://x/y cannot be used as storage: Protocol not known: nonsense",
        ),
        ("ftp://127.0.0.1:1/x", "ftp://127.0.0.1:1/x cannot be reached: Connection refused"),
    ],
)
def test_no_such_storage_is_one_sentence(url, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert is_shared(url)
    with pytest.raises(ConfigError, match=words):
        ObjectStore(url)
    for command in (
        ["compare", "rotated-digits", "--out", url],
        ["paper", "build", "table1", "--scale", "small", "--runs", url],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(command)
        assert stopped.value.code == 2
        assert capsys.readouterr().err == f"forgetless: {words}\n"
    assert not any(tmp_path.iterdir())


def test_two_builds_on_one_shared_folder_the_second_is_refused(capsys, tmp_path):
    command = ["paper", "build", "table1", "--scale", "small", "--runs", f"file://{tmp_path}/runs"]
    with FolderLock(tmp_path / "runs"), pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    assert "is being written by process" in capsys.readouterr().err


def test_a_build_in_shared_storage_trains_nothing_twice(server, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runs = server[0] + "/paper"
    build = ["paper", "build", "table1", "--scale", "small", "--device", "cpu", "--seeds", "1"]

    def built(folder, *options):
        with pytest.raises(SystemExit) as stopped:
            main([*build, "--results", folder, "--page", f"{folder}/page.md", *options])
        assert stopped.value.code == 0
        return load_results(tmp_path / folder, ["table1"])["table1"]["data"]

    first = built("first", "--runs", runs)
    assert "(1 of 20 runs)" in capsys.readouterr().err
    monkeypatch.setattr("forgetless.paper.workshop.train", None)  # calling it would fail
    assert built("second", "--runs", runs) == first
    assert "runs)" not in capsys.readouterr().err
