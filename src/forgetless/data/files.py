"""Read files from outside within bounds: checksums, gzip and the IDX format."""

import hashlib
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forgetless.support.validation import DataError

IDX_UNSIGNED_BYTE = 0x08
GZIP_WINDOW_BITS = 31  # to zlib: a gzip header and trailer, a window of any size
GZIP_OVERHEAD = 1024  # more than gzip adds to data that it cannot compress


class DamagedFileError(DataError):
    """A file that differs from the one published under its name; `path` is where it lies."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path = path


@dataclass(frozen=True)
class PublishedFile:
    """A published file: its name, its SHA-256, and a bound on its size."""

    name: str
    sha256: str
    max_bytes: int


@dataclass(frozen=True)
class IdxFile:
    """An IDX file of unsigned bytes: its plain name, its shape, and the SHA-256 of both its forms.

    `sha256` is None if only the gzipped file has a published checksum; the plain file is then
    rejected, since it cannot be verified.
    """

    name: str
    shape: tuple[int, ...]
    gzip_sha256: str
    sha256: str | None = None

    @property
    def n_bytes(self) -> int:
        """Size of the plain file: the header and one byte per entry."""
        return 4 + 4 * len(self.shape) + math.prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """The accepted file names, the preferred one first."""
        return (f"{self.name}.gz",) if self.sha256 is None else (f"{self.name}.gz", self.name)

    @property
    def published(self) -> PublishedFile:
        """The gzipped file, which mirrors serve."""
        return PublishedFile(f"{self.name}.gz", self.gzip_sha256, self.n_bytes + GZIP_OVERHEAD)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, read in pieces."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def exists(path: Path) -> bool:
    """Whether the path is a file."""
    try:
        return path.is_file()
    except OSError as error:
        raise unreadable(path, error) from error


def is_intact(path: Path, published: PublishedFile) -> bool:
    """Whether the file exists and is, bit for bit, the published one."""
    return exists(path) and sha256_of(path) == published.sha256


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The content of a file of at most `max_bytes`."""
    try:
        with path.open("rb") as stream:
            content = stream.read(max_bytes + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) > max_bytes:
        raise DamagedFileError(path, f"is larger than the accepted {max_bytes} bytes")
    return content


def read_verified(path: Path, sha256: str, max_bytes: int) -> bytes:
    """The content of a file with the expected SHA-256."""
    content = read_bounded(path, max_bytes)
    check_sha256(content, sha256, path)
    return content


def check_sha256(content: bytes, sha256: str, path: Path) -> None:
    """Reject content without the expected SHA-256; the error names its file."""
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DamagedFileError(path, mismatch(found, sha256))


def mismatch(found: str, expected: str) -> str:
    """The reason to reject a file with a wrong SHA-256."""
    return (
        "is truncated, corrupted or not the published file "
        f"(SHA-256 {found[:12]}…, expected {expected[:12]}…)"
    )


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file that the operating system cannot read."""
    return DataError(f"{path} cannot be read: {error.strerror or type(error).__name__}")


def gunzip_bounded(packed: bytes, n_bytes: int, path: Path) -> bytes:
    """Decompress exactly one gzip stream of `n_bytes`; never inflate more than one byte more."""
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
    """The uint8 tensor of an IDX file with exactly this shape."""
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, IDX_UNSIGNED_BYTE, len(shape), *shape)
    if content[: len(header)] != header:
        raise DamagedFileError(
            path, f"does not begin with the IDX header of bytes of shape {shape}"
        )
    expected = len(header) + math.prod(shape)
    if len(content) != expected:
        raise DamagedFileError(path, f"has {len(content)} bytes instead of {expected}")
    # A copy, because torch needs writable memory.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=len(header)).reshape(
        shape
    )


def read_idx(path: Path, idx: IdxFile) -> Tensor:
    """Verify and read an IDX file, gzipped or plain, into a uint8 tensor."""
    if path.suffix == ".gz":
        packed = read_verified(path, idx.gzip_sha256, idx.published.max_bytes)
        content = gunzip_bounded(packed, idx.n_bytes, path)
    elif idx.sha256 is not None:
        content = read_verified(path, idx.sha256, idx.n_bytes)
    else:
        raise DataError(f"{path} cannot be verified: only {idx.name}.gz has a published checksum")
    return parse_idx(content, idx.shape, path)


def check_labels(labels: Tensor, n_classes: int, path: Path) -> Tensor:
    """The labels as int64; all must be below `n_classes`."""
    highest = int(labels.max())
    if highest >= n_classes:
        raise DamagedFileError(path, f"has the label {highest}, which must be below {n_classes}")
    return labels.to(torch.int64)
