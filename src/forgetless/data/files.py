"""Files from outside, read with bounds: checksums, gzip, the IDX format, and atomic writing."""

import hashlib
import math
import os
import secrets
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from forgetless.support.errors import DataError

IDX_UNSIGNED_BYTE = 0x08
GZIP_WINDOW_BITS = 31  # zlib's way to say "a gzip header and trailer, window of any size"
GZIP_OVERHEAD = 1024  # what gzip may add to data that it cannot shrink, generously


class DamagedFileError(DataError):
    """A file that is not what was published under its name; `path` says which one."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path


@dataclass(frozen=True)
class PublishedFile:
    """A file as its publisher made it: name, SHA-256, and a size that it does not exceed."""

    name: str
    sha256: str
    max_bytes: int


@dataclass(frozen=True)
class IdxFile:
    """An IDX file of unsigned bytes: its plain name, its shape, and its two SHA-256.

    `sha256` is None when only the gzipped file has a published checksum; the plain file is then
    not accepted, since nothing could vouch for it.
    """

    name: str
    shape: tuple[int, ...]
    gzip_sha256: str
    sha256: str | None = None

    @property
    def n_bytes(self) -> int:
        """Size of the plain file: the header and one byte for each entry."""
        return 4 + 4 * len(self.shape) + math.prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """The file names under which it is accepted, the preferred one first."""
        return (f"{self.name}.gz",) if self.sha256 is None else (f"{self.name}.gz", self.name)

    @property
    def published(self) -> PublishedFile:
        """The gzipped file, as mirrors serve it."""
        return PublishedFile(f"{self.name}.gz", self.gzip_sha256, self.n_bytes + GZIP_OVERHEAD)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, read piece by piece whatever its size."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def exists(path: Path) -> bool:
    """Whether there is a file, as opposed to nothing or a folder."""
    try:
        return path.is_file()
    except OSError as error:
        raise unreadable(path, error) from error


def is_intact(path: Path, published: PublishedFile) -> bool:
    """Whether the file is there and is, bit for bit, the published one."""
    return exists(path) and sha256_of(path) == published.sha256


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The whole content of a file, refused when it is larger than `max_bytes`."""
    try:
        with path.open("rb") as stream:
            content = stream.read(max_bytes + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) > max_bytes:
        raise DamagedFileError(path, f"is larger than the {max_bytes} bytes it may have")
    return content


def read_verified(path: Path, sha256: str, max_bytes: int) -> bytes:
    """The content of a file whose SHA-256 is the expected one; anything else is refused."""
    content = read_bounded(path, max_bytes)
    check_sha256(content, sha256, path)
    return content


def check_sha256(content: bytes, sha256: str, path: Path) -> None:
    """Refuse content whose SHA-256 is not the expected one, naming the file it came from."""
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DamagedFileError(path, mismatch(found, sha256))


def mismatch(found: str, expected: str) -> str:
    """The reason given for a file with a wrong SHA-256."""
    return (
        "is truncated, corrupted or not the published file "
        f"(SHA-256 {found[:12]}…, expected {expected[:12]}…)"
    )


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file or folder that the operating system does not let us read."""
    return DataError(f"{path} cannot be read: {error.strerror or type(error).__name__}")


def gunzip_bounded(packed: bytes, n_bytes: int, path: Path) -> bytes:
    """Decompress exactly one gzip stream of `n_bytes`, inflating at most one byte beyond that."""
    unpacker = zlib.decompressobj(wbits=GZIP_WINDOW_BITS)
    try:
        content = unpacker.decompress(packed, n_bytes + 1)
    except zlib.error as error:
        raise DamagedFileError(path, f"is not a sound gzip file: {error}") from error
    if len(content) > n_bytes:
        raise DamagedFileError(path, f"inflates to more than the expected {n_bytes} bytes")
    if len(content) < n_bytes or not unpacker.eof:
        raise DamagedFileError(path, f"is a truncated gzip file of an expected {n_bytes} bytes")
    if unpacker.unused_data:
        raise DamagedFileError(path, "has data after the end of its gzip stream")
    return content


def parse_idx(content: bytes, shape: tuple[int, ...], path: Path) -> Tensor:
    """The uint8 tensor of the given shape in an IDX file; magic, shape and length must all fit."""
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, IDX_UNSIGNED_BYTE, len(shape), *shape)
    if content[: len(header)] != header:
        raise DamagedFileError(path, f"does not begin with the IDX header of {shape} bytes")
    expected = len(header) + math.prod(shape)
    if len(content) != expected:
        raise DamagedFileError(path, f"has {len(content)} bytes instead of {expected}")
    # torch wants memory that may be written to, hence the copy.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=len(header)).reshape(
        shape
    )


def read_idx(path: Path, idx: IdxFile) -> Tensor:
    """Verify and read an IDX file, gzipped or plain, into a uint8 tensor of its shape."""
    if path.suffix == ".gz":
        packed = read_verified(path, idx.gzip_sha256, idx.published.max_bytes)
        content = gunzip_bounded(packed, idx.n_bytes, path)
    elif idx.sha256 is not None:
        content = read_verified(path, idx.sha256, idx.n_bytes)
    else:
        raise DataError(f"{path} cannot be verified: only {idx.name}.gz has a published checksum")
    return parse_idx(content, idx.shape, path)


def check_labels(labels: Tensor, n_classes: int, path: Path) -> Tensor:
    """The labels as int64, refused when one of them is not below `n_classes`."""
    highest = int(labels.max())
    if highest >= n_classes:
        raise DamagedFileError(path, f"has the label {highest}, which must be below {n_classes}")
    return labels.to(torch.int64)


def remove(path: Path) -> None:
    """Delete a file, if it is still there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path} cannot be deleted: {error.strerror}") from error


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under `path` complete or not at all.

    It is written beside its place under a name of its own, so that two processes may write the
    same file at once: the last one to finish wins, and readers never see half a file.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with partial.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
