"""One writer for one folder: a lock that the operating system lets go of when its process ends."""

import contextlib
import errno
import json
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self, final

from forgetless.support.errors import TraceError, UnwritableError

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
_MOST_BYTES = 1 << 12  # of what a lock says about its owner
_TRIES = 100


@final
class FolderLock:
    """Holds a folder for one process while in the block; a second one is refused at once.

    The lock is one on an open file where the system has them (`flock`), gone with the process
    however it ends. Elsewhere, and on file systems without them, the file is the lock; one that
    a dead process of this machine has left is taken over.

    Arguments:
        folder: made if it is missing, and removed again if nothing came to be written in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / LOCK
        self._handle: int | None = None
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        try:
            for path in reversed((self.folder, *self.folder.parents)):
                if not path.exists():
                    path.mkdir(exist_ok=True)
                    self._made.append(path)
            self._handle = _locked(self._file)
            owner = {"pid": os.getpid(), "host": socket.gethostname()}
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps(owner).encode(), 0)
        except OSError as error:
            self._release()
            raise UnwritableError(f"{self.folder} cannot be written: {error.strerror}") from error
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def _release(self) -> None:
        with contextlib.suppress(OSError):
            if self._handle is not None:
                # First the name, then the lock: who opens the file in between sees that it is gone.
                self._file.unlink(missing_ok=True)
                os.close(self._handle)
        self._handle = None
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # not empty: there are results in it
                folder.rmdir()
        self._made.clear()


def is_locked(folder: Path) -> bool:
    """Whether a process holds the folder now."""
    file = folder / LOCK
    if not file.is_file():
        return False
    try:
        handle = _locked(file)
        file.unlink(missing_ok=True)
        os.close(handle)
    except TraceError:
        return True
    except OSError:  # it cannot be written, which who tries to will be told
        return False
    return False


def _locked(file: Path) -> int:
    """The open lock file, locked; `TraceError` if another process has it."""
    if fcntl is None:
        return _claimed(file)
    for _ in range(_TRIES):
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The owner before may have removed the file after it was opened here.
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(handle).st_ino == file.stat().st_ino:
                    return handle
            os.close(handle)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise _held(file) from error
            if _owner(file)[0] is None:  # made just now, on a file system without locks
                file.unlink(missing_ok=True)
            return _claimed(file)
    raise _held(file)


def _claimed(file: Path) -> int:
    """The lock file made anew, its being there the lock; that of a dead process is removed."""
    for _ in range(_TRIES):
        try:
            return os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            pid, host = _owner(file)
            if pid is None or host != socket.gethostname() or _lives(pid):
                raise _held(file) from None
            file.unlink(missing_ok=True)
    raise _held(file)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _owner(file: Path) -> tuple[int | None, str]:
    """The process that has the lock and its machine, as far as the file says."""
    try:
        with file.open("rb") as stream:
            owner = json.loads(stream.read(_MOST_BYTES))
        return int(owner["pid"]), ascii(str(owner["host"]))[1:-1][:80]
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None, ""


def _held(file: Path) -> TraceError:
    pid, host = _owner(file)
    by = "another process" if pid is None else f"process {pid} on {host}"
    return TraceError(
        f"{file.parent} is being written by {by}; wait for it or choose another --out"
    )
