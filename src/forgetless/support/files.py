"""Atomic writing of files."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from forgetless.support.errors import UnwritableError


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
