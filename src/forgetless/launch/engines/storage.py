"""A folder that several machines share: any place that fsspec can read and write."""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

from forgetless.support.errors import ConfigError, TraceError, UnwritableError
from forgetless.support.files import write_atomically


def is_shared(place: str) -> bool:
    """Whether a place is an address of shared storage, and no path of this machine."""
    return "://" in place


def shown(url: str) -> str:
    """An address without the password that may be in it."""
    return re.sub(r"//[^/@]*@", "//", url.rstrip("/"))


@final
class ObjectStore:
    """A folder in shared storage.

    Nothing in it is trusted: what is read is JSON and safetensors, and checked.

    Arguments:
        url: its address, such as s3://bucket/runs or file:///shared/runs.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.name = shown(url)
        from fsspec.core import url_to_fs  # costs a moment, and few need it

        try:
            self._system, root = url_to_fs(self.url)
        except (ValueError, TypeError) as error:
            words = f"{self.name} cannot be used as storage: {_reason(error)}"
            raise ConfigError(words) from error
        except ImportError as error:
            raise ConfigError(f"{self.name} needs another package: {_reason(error)}") from error
        except Exception as error:  # each kind of storage has errors of its own
            raise ConfigError(f"{self.name} cannot be reached: {_reason(error)}") from error
        self._root = str(root).rstrip("/")

    def within(self, name: str) -> Self:
        """A folder in it."""
        return type(self)(f"{self.url}/{name}")

    @property
    def path(self) -> Path | None:
        """Its path, if it is on a file system of this machine and can be locked."""
        return Path(self._root) if "file" in _protocols(self._system) else None

    def names(self) -> list[str]:
        """All files below it."""
        with self._reading(""):
            self._system.invalidate_cache()
            try:
                found = self._system.find(self._root)
            except FileNotFoundError:
                return []
        roots = (f"{self._root}/", f"{self._root.lstrip('/')}/")
        names = [next((n[len(r) :] for r in roots if n.startswith(r)), "") for n in found]
        return sorted(name for name in names if name)

    def size(self, name: str) -> int:
        """Bytes of a file."""
        with self._reading(name):
            return int(self._system.size(self._at(name)))

    def read(self, name: str, most: int) -> bytes:
        """A small file."""
        if self.size(name) > most:
            raise TraceError(f"{self.name}/{name} is larger than the {most} bytes allowed")
        with self._reading(name):
            return bytes(self._system.cat_file(self._at(name)))

    def get(self, name: str, file: Path) -> None:
        """Copy a file from there."""

        def copy(temporary: Path) -> None:
            with self._reading(name):
                self._system.get_file(self._at(name), str(temporary))

        write_atomically(file, copy)

    def put(self, file: Path, name: str) -> None:
        """Copy a file there, under a name that nothing has, or that nobody reads yet."""
        with self._writing(name):
            self._make_folder(name)
            self._system.put_file(str(file), self._at(name))

    def replace(self, file: Path, name: str) -> None:
        """Copy a file there so that under its name there is the old one or the whole new one."""
        folder, _, last = name.rpartition("/")
        beside = f"{folder}/" * bool(folder) + f".{last}.{secrets.token_hex(4)}"
        self.put(file, beside)
        with self._writing(name):
            self._system.mv(self._at(beside), self._at(name))

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with self._writing(name):
            self._make_folder(name)
            self._system.pipe_file(self._at(name), content)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._writing(name):
            self._system.invalidate_cache()
            if self._system.exists(self._at(name)):
                self._system.rm_file(self._at(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder and all in it, if it is there."""
        with self._writing(name):
            self._system.invalidate_cache()
            if self._system.exists(self._at(name)):
                self._system.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_folder(self, name: str) -> None:
        self._system.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except (TraceError, FileNotFoundError):
            raise
        except Exception as error:  # each kind of storage has errors of its own
            raise TraceError(f"{self.name}/{name} cannot be read: {_reason(error)}") from error

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # each kind of storage has errors of its own
            raise UnwritableError(
                f"{self.name}/{name} cannot be written: {_reason(error)}"
            ) from error


def _protocols(system: Any) -> tuple[str, ...]:
    own = system.protocol
    return (own,) if isinstance(own, str) else tuple(own)


def _reason(error: BaseException) -> str:
    words = getattr(error, "strerror", None) or str(error)
    return words.splitlines()[0][:200] if words else type(error).__name__
