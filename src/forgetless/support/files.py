"""Files: written atomically, locked by one process, and JSON among tensors."""

import contextlib
import errno
import json
import os
import re
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, final

import torch
from safetensors import SafetensorError
from torch import Tensor

from forgetless.support.validation import TraceError, UnwritableError

LOCK = ".lock"
_MOST_BYTES = 1 << 12  # that are read of a lock file
_TRIES = 100


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file; whatever happens, it is either the old one or the whole new one."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            with temporary.open("rb+") as written:
                os.fsync(written.fileno())
            # mkstemp makes files private; a trace gets the usual permissions.
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)
            temporary.replace(file)
            _sync_folder(file.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnwritableError(f"{file} cannot be written: {reason}") from error


def _sync_folder(folder: Path) -> None:
    """Flush the new name to disk, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def json_tensor(value: Any) -> Tensor:
    """A value as the bytes of its JSON, (n,) uint8; what JSON does not know, as text."""
    text = json.dumps(value, separators=(",", ":"), default=str).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def json_value(tensor: Tensor) -> Any:
    """The value in a tensor that `json_tensor` made."""
    return json.loads(bytes(tensor.cpu().tolist()))


try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]


@final
class FolderLock:
    """Locks a folder for this process within the block; a second process is rejected at once.

    It is a `flock` on an open file, released with the process however it ends. On systems and file
    systems without `flock`, the existence of the file is the lock, and one that a dead process of
    this machine left is taken over.

    Arguments:
        folder: created if it is missing, and removed again if nothing was written in it.
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

    def __exit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        with contextlib.suppress(OSError):
            if self._handle is not None:
                # Unlinked before it is unlocked, so that a process that opens it now sees it gone.
                self._file.unlink(missing_ok=True)
                os.close(self._handle)
        self._handle = None
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
        self._made.clear()


def is_locked(folder: Path) -> bool:
    """Whether a process has locked the folder."""
    file = folder / LOCK
    if not file.is_file():
        return False
    try:
        handle = _locked(file)
        file.unlink(missing_ok=True)
        os.close(handle)
    except TraceError:
        return True
    except OSError:  # not writable, which the next writer reports
        return False
    return False


def _locked(file: Path) -> int:
    """The lock file, open and locked; `TraceError` if another process has it."""
    if fcntl is None:
        return _claimed(file)
    for _ in range(_TRIES):
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous owner may have removed the file after it was opened here.
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(handle).st_ino == file.stat().st_ino:
                    return handle
            os.close(handle)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise _held(file) from error
            if _owner(file)[0] is None:  # created just now, on a file system without `flock`
                file.unlink(missing_ok=True)
            return _claimed(file)
    raise _held(file)


def _claimed(file: Path) -> int:
    """The lock file, created, so that its existence is the lock; a dead process's is replaced."""
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
    """The pid and host of the lock's owner, as far as the file has them."""
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


def is_shared(place: str) -> bool:
    """Whether a place is an address of shared storage rather than a local path."""
    return "://" in place


def without_password(url: str) -> str:
    """An address without the password that may be in it."""
    return re.sub(r"//[^/@]*@", "//", url.rstrip("/"))
