"""Read CIFAR-100 in its published forms: binary rows or Python pickles, in folders or tarballs."""

import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forgetless.data.files import (
    DamagedFileError,
    PublishedFile,
    check_labels,
    check_sha256,
    mismatch,
    read_bounded,
    sha256_of,
    unreadable,
)
from forgetless.data.restricted_pickle import ByteArray, load_plain_pickle

N_CLASSES = 100
IMAGE_SHAPE = (3, 32, 32)
PIXELS_PER_IMAGE = 3 * 32 * 32
LABELS_PER_ROW = 2  # the coarse label, then the fine one
ROW_BYTES = LABELS_PER_ROW + PIXELS_PER_IMAGE
# In protocol 2 Python 3 writes bytes as text (half of them take two bytes), and names too.
MAX_PICKLE_BYTES_PER_ROW = 2 * PIXELS_PER_IMAGE + 256
MAX_PICKLE_OVERHEAD = 4096
MAX_TARBALL_BYTES = 200_000_000  # both published ones have 169 million


@dataclass(frozen=True)
class Subset:
    """The training or the test set: its number of images, and the SHA-256 of its binary rows."""

    n_images: int
    rows_sha256: str


@dataclass(frozen=True)
class Form:
    """A published form of the dataset: its folder, its training and test file, and its tarball.

    `decode(content, n_images, path)` turns the content of one file into binary rows (coarse
    label, fine label, 3072 pixels). Both forms have the same images in the same order, so the
    SHA-256 of those rows verifies both.
    """

    folder: str
    file_names: tuple[str, str]
    max_bytes_per_image: int
    decode: Callable[[bytes, int, Path], bytes]
    tarball: PublishedFile

    def max_file_bytes(self, n_images: int) -> int:
        """A bound on the size of a file of `n_images` images."""
        return n_images * self.max_bytes_per_image + MAX_PICKLE_OVERHEAD


def read_folder(
    form: Form, parts: Sequence[Subset], paths: Sequence[Path]
) -> list[tuple[Tensor, Tensor]]:
    """Verify and read the training and the test file: images (n, 3, 32, 32), fine labels (n,)."""
    splits = []
    for part, path in zip(parts, paths, strict=True):
        content = read_bounded(path, form.max_file_bytes(part.n_images))
        splits.append(parse_part(form, part, content, path))
    return splits


def read_tarball(
    form: Form, parts: Sequence[Subset], paths: Sequence[Path]
) -> list[tuple[Tensor, Tensor]]:
    """The same as `read_folder`, from the one tarball in `paths`."""
    (path,) = paths
    # Verified before it is opened; its rows are verified again.
    found = sha256_of(path)
    if found != form.tarball.sha256:
        raise DamagedFileError(path, mismatch(found, form.tarball.sha256))
    members = [f"{form.folder}/{file_name}" for file_name in form.file_names]
    limits = [form.max_file_bytes(part.n_images) for part in parts]
    contents = read_members(path, dict(zip(members, limits, strict=True)))
    return [
        parse_part(form, part, contents[member], path)
        for part, member in zip(parts, members, strict=True)
    ]


def read_members(path: Path, max_bytes: dict[str, int]) -> dict[str, bytes]:
    """The content of some files in a gzipped tarball, in one pass and without extracting it."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path, mode="r|gz") as tarball:
            for entry in tarball:
                limit = max_bytes.get(entry.name, -1)
                stream = tarball.extractfile(entry) if entry.isreg() and limit >= 0 else None
                if stream is not None and entry.size <= limit:
                    contents[entry.name] = stream.read()
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise DamagedFileError(path, f"is not a sound tarball: {error}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if missing := max_bytes.keys() - contents.keys():
        raise DamagedFileError(path, f"has no usable file {' and '.join(sorted(missing))}")
    return contents


def parse_part(form: Form, part: Subset, content: bytes, path: Path) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) uint8 and fine labels (n,) int64 from the content of one file."""
    rows = form.decode(content, part.n_images, path)
    check_sha256(rows, part.rows_sha256, path)
    table = np.frombuffer(rows, dtype=np.uint8).reshape(part.n_images, ROW_BYTES)
    images = torch.from_numpy(np.ascontiguousarray(table[:, LABELS_PER_ROW:]))
    fine_labels = torch.from_numpy(table[:, LABELS_PER_ROW - 1].copy())
    return images.reshape(-1, *IMAGE_SHAPE), check_labels(fine_labels, N_CLASSES, path)


def rows_from_binary(content: bytes, n_images: int, path: Path) -> bytes:
    """The rows of a binary file are its content: check their number."""
    if len(content) != n_images * ROW_BYTES:
        raise DamagedFileError(
            path, f"has {len(content)} bytes instead of {n_images * ROW_BYTES}: it is damaged"
        )
    return content


def rows_from_pickle(content: bytes, n_images: int, path: Path) -> bytes:
    """The rows of a file of the Python form, in the layout of the binary form."""
    fields, pixels = pickled_pixels(content, n_images, path)
    columns = [
        label_bytes(fields.get(key), n_images, key.decode(), path)[:, None]
        for key in (b"coarse_labels", b"fine_labels")
    ]
    return np.concatenate([*columns, pixels], axis=1).tobytes()


def pickled_pixels(
    content: bytes, n_images: int, path: Path
) -> tuple[dict[object, object], npt.NDArray[np.uint8]]:
    """The fields of a file of the Python form, and its pixels (n, 3072)."""
    fields = load_plain_pickle(content, path)
    if not isinstance(fields, dict):
        raise DamagedFileError(path, "is not a pickled dictionary")
    pixels = fields.get(b"data")
    if not isinstance(pixels, ByteArray) or pixels.shape != (n_images, PIXELS_PER_IMAGE):
        raise DamagedFileError(path, f"has no images of shape ({n_images}, {PIXELS_PER_IMAGE})")
    return fields, np.frombuffer(pixels.content, dtype=np.uint8).reshape(pixels.shape)


def label_bytes(labels: object, n_images: int, key: str, path: Path) -> npt.NDArray[np.uint8]:
    """The labels in a pickled list, one byte each."""
    if not isinstance(labels, list) or len(labels) != n_images:
        raise DamagedFileError(path, f"has no list {key} of {n_images} labels")
    if not all(type(label) is int and 0 <= label < N_CLASSES for label in labels):
        raise DamagedFileError(path, f"has {key} that are not integers below {N_CLASSES}")
    return np.array(labels, dtype=np.uint8)


PARTS = (
    Subset(50_000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
    Subset(10_000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
)
BINARY = Form(
    folder="cifar-100-binary",
    file_names=("train.bin", "test.bin"),
    max_bytes_per_image=ROW_BYTES,
    decode=rows_from_binary,
    tarball=PublishedFile(
        "cifar-100-binary.tar.gz",
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        MAX_TARBALL_BYTES,
    ),
)
PYTHON = Form(
    folder="cifar-100-python",
    file_names=("train", "test"),
    max_bytes_per_image=MAX_PICKLE_BYTES_PER_ROW,
    decode=rows_from_pickle,
    tarball=PublishedFile(
        "cifar-100-python.tar.gz",
        "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        MAX_TARBALL_BYTES,
    ),
)
