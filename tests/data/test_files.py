"""Checksums, gzip and IDX: sound files are read, all others rejected."""

import gzip
import hashlib
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgetless.data import files
from forgetless.data.files import IdxFile, PublishedFile
from forgetless.support.validation import DataError

PATH = Path("folder/some-file")
SHAPE = (3, 2, 4)
PIXELS = bytes(range(24))
IDX = b"\x00\x00\x08\x03" + struct.pack(">3I", *SHAPE) + PIXELS


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def flip(content: bytes, bit: int) -> bytes:
    position = bit % (8 * len(content))
    changed = bytearray(content)
    changed[position // 8] ^= 1 << (position % 8)
    return bytes(changed)


def test_idx_gives_the_tensor_of_its_shape() -> None:
    tensor = files.parse_idx(IDX, SHAPE, PATH)
    assert tensor.dtype == torch.uint8
    assert torch.equal(tensor, torch.arange(24, dtype=torch.uint8).reshape(SHAPE))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        IDX[:3],
        IDX[:-1],
        IDX + b"\x00",
        b"\x00\x00\x09\x03" + IDX[4:],
        b"\x00\x00\x08\x02" + IDX[4:],
        IDX[:4] + struct.pack(">3I", 3, 4, 2) + PIXELS,
        IDX[:4] + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1),
    ],
    ids=["empty", "stub", "short", "long", "type", "dimensions", "shape", "giant"],
)
def test_idx_of_another_form_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(DataError, match="folder/some-file"):
        files.parse_idx(content, SHAPE, PATH)


@given(st.binary(max_size=80))
def test_random_bytes_are_no_idx_file(content: bytes) -> None:
    with pytest.raises(DataError):
        files.parse_idx(content, SHAPE, PATH)


@given(st.integers(0, 8 * 16 - 1))
def test_every_bit_of_the_idx_header_matters(bit: int) -> None:
    with pytest.raises(DataError):
        files.parse_idx(flip(IDX[:16], bit) + PIXELS, SHAPE, PATH)


def test_gunzip_gives_the_content() -> None:
    assert files.gunzip_bounded(gzip.compress(IDX), len(IDX), PATH) == IDX


@given(st.integers(0, len(gzip.compress(IDX)) - 1))
def test_a_truncated_gzip_stream_is_refused(length: int) -> None:
    with pytest.raises(DataError, match="folder/some-file"):
        files.gunzip_bounded(gzip.compress(IDX)[:length], len(IDX), PATH)


@given(st.integers(min_value=0, max_value=10_000))
def test_a_flipped_bit_changes_nothing_or_is_refused(bit: int) -> None:
    try:
        content = files.gunzip_bounded(flip(gzip.compress(IDX, mtime=0), bit), len(IDX), PATH)
    except DataError:
        return
    assert content == IDX  # a bit of the time stamp or of the name of the system


@given(st.binary(max_size=200))
def test_random_bytes_are_no_gzip_stream(packed: bytes) -> None:
    with pytest.raises(DataError):
        files.gunzip_bounded(packed, 24, PATH)


def test_more_than_expected_is_never_inflated() -> None:
    bomb = gzip.compress(bytes(100_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="more than the expected 1000 bytes"):
            files.gunzip_bounded(bomb, 1000, PATH)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_data_after_the_gzip_stream_is_refused() -> None:
    with pytest.raises(DataError, match="after the end"):
        files.gunzip_bounded(gzip.compress(IDX) + b"more", len(IDX), PATH)


def test_read_idx_takes_gzipped_and_plain_files(tmp_path: Path) -> None:
    packed = gzip.compress(IDX)
    idx = IdxFile("images", SHAPE, gzip_sha256=sha256(packed), sha256=sha256(IDX))
    (tmp_path / "images.gz").write_bytes(packed)
    (tmp_path / "images").write_bytes(IDX)
    assert idx.names == ("images.gz", "images")
    for name in idx.names:
        assert torch.equal(
            files.read_idx(tmp_path / name, idx), files.parse_idx(IDX, SHAPE, tmp_path)
        )


def test_a_plain_file_without_a_checksum_is_refused(tmp_path: Path) -> None:
    idx = IdxFile("images", SHAPE, gzip_sha256=sha256(b""))
    (tmp_path / "images").write_bytes(IDX)
    assert idx.names == ("images.gz",)
    with pytest.raises(DataError, match="cannot be verified"):
        files.read_idx(tmp_path / "images", idx)


@pytest.mark.parametrize("content", [IDX[:-1], flip(IDX, 200), IDX + b"\x00", b""])
def test_read_verified_names_the_file_that_is_wrong(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        files.read_verified(path, sha256(IDX), len(IDX))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        files.read_bounded(tmp_path / "nothing", 10)
    with pytest.raises(DataError, match="cannot be read"):
        files.sha256_of(tmp_path)


def test_intact_means_there_and_equal(tmp_path: Path) -> None:
    path, published = tmp_path / "file", PublishedFile("file", sha256(b"right"), 10)
    assert not files.is_intact(path, published)
    path.write_bytes(b"wrong")
    assert not files.is_intact(path, published)
    path.write_bytes(b"right")
    assert files.is_intact(path, published)


def test_labels_are_int64_and_below_the_number_of_classes() -> None:
    labels = torch.tensor([0, 9, 3], dtype=torch.uint8)
    checked = files.check_labels(labels, 10, PATH)
    assert checked.dtype == torch.int64
    assert checked.tolist() == [0, 9, 3]
    with pytest.raises(DataError, match="label 9"):
        files.check_labels(labels, 9, PATH)
