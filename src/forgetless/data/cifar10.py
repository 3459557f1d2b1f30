"""Read CIFAR-10 in its published forms: the folder of Python pickles, or a tarball of either form.

Of the files outside of a tarball only those of the Python form have published checksums, in MD5.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forgetless.data.cifar import (
    IMAGE_SHAPE,
    MAX_PICKLE_BYTES_PER_ROW,
    MAX_PICKLE_OVERHEAD,
    MAX_TARBALL_BYTES,
    PIXELS_PER_IMAGE,
    label_bytes,
    pickled_pixels,
    read_members,
)
from forgetless.data.files import (
    DamagedFileError,
    PublishedFile,
    check_labels,
    mismatch,
    read_bounded,
    sha256_of,
)

N_CLASSES = 10
ROW_BYTES = 1 + PIXELS_PER_IMAGE  # the label first


@dataclass(frozen=True)
class Edition:
    """A published form of the dataset: its folder, its six files, the test file last, its tarball.

    Arguments:
        decode: (content, images, path) → binary rows of a label and 3072 pixels.
        md5: of each file outside of the tarball; none if they cannot be verified.
        n_images: in each file.
    """

    folder: str
    file_names: tuple[str, ...]
    decode: Callable[[bytes, int, Path], bytes]
    tarball: PublishedFile
    md5: tuple[str, ...] = ()
    n_images: int = 10_000

    @property
    def max_file_bytes(self) -> int:
        """A bound on the size of a file."""
        return self.n_images * MAX_PICKLE_BYTES_PER_ROW + MAX_PICKLE_OVERHEAD

    def splits(self, contents: Sequence[bytes], path: Path) -> list[tuple[Tensor, Tensor]]:
        """Images (n, 3, 32, 32) uint8 and labels (n,) int64, for training and for testing."""
        batches = [self.decode(content, self.n_images, path) for content in contents]
        return [_images(b"".join(batches[:-1]), path), _images(batches[-1], path)]


def read_folder(form: Edition, paths: Sequence[Path]) -> list[tuple[Tensor, Tensor]]:
    """Verify and read the six files of the Python form."""
    contents = []
    for path, expected in zip(paths, form.md5, strict=True):
        contents.append(read_bounded(path, form.max_file_bytes))
        found = hashlib.md5(contents[-1], usedforsecurity=False).hexdigest()
        if found != expected:
            raise DamagedFileError(path, mismatch(found, expected).replace("SHA-256", "MD5"))
    return form.splits(contents, paths[0].parent)


def read_tarball(form: Edition, paths: Sequence[Path]) -> list[tuple[Tensor, Tensor]]:
    """The same from the one tarball in `paths`, which is verified before it is opened."""
    (path,) = paths
    found = sha256_of(path)
    if found != form.tarball.sha256:
        raise DamagedFileError(path, mismatch(found, form.tarball.sha256))
    members = [f"{form.folder}/{name}" for name in form.file_names]
    contents = read_members(path, dict.fromkeys(members, form.max_file_bytes))
    return form.splits([contents[member] for member in members], path)


def rows_from_binary(content: bytes, n_images: int, path: Path) -> bytes:
    """The rows of a binary file are its content: check their number."""
    expected = n_images * ROW_BYTES
    if len(content) != expected:
        raise DamagedFileError(path, f"has {len(content)} bytes instead of {expected} in a file")
    return content


def rows_from_pickle(content: bytes, n_images: int, path: Path) -> bytes:
    """The rows of a file of the Python form, in the layout of the binary form."""
    fields, pixels = pickled_pixels(content, n_images, path)
    labels = label_bytes(fields.get(b"labels"), n_images, "labels", path)
    return np.concatenate([labels[:, None], pixels], axis=1).tobytes()


def _images(rows: bytes, path: Path) -> tuple[Tensor, Tensor]:
    table = np.frombuffer(rows, dtype=np.uint8).reshape(-1, ROW_BYTES)
    images = torch.from_numpy(np.ascontiguousarray(table[:, 1:]))
    labels = torch.from_numpy(table[:, 0].copy())
    return images.reshape(-1, *IMAGE_SHAPE), check_labels(labels, N_CLASSES, path)


BINARY = Edition(
    folder="cifar-10-batches-bin",
    file_names=(*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"),
    decode=rows_from_binary,
    tarball=PublishedFile(
        "cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        MAX_TARBALL_BYTES,
    ),
)
PYTHON = Edition(
    folder="cifar-10-batches-py",
    file_names=(*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"),
    decode=rows_from_pickle,
    tarball=PublishedFile(
        "cifar-10-python.tar.gz",
        "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        MAX_TARBALL_BYTES,
    ),
    md5=(
        "c99cafc152244af753f735de768cd75f",
        "d4bba439e000b95fd0a9bffe97cbabec",
        "54ebc095f3ab1f0389bbae665268c751",
        "634d18415352ddfa80567beed471001a",
        "482c414d41f54cd18b22e5b47cb7c3cb",
        "40351d587109b95175f43aff81a1287e",
    ),
)
