"""CIFAR-100 in both forms, from folders and tarballs, small here and real where it is at hand."""

import hashlib
import io
import os
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgetless.data import cifar
from forgetless.data.cifar import BINARY, PYTHON, ROW_BYTES, Form, Subset
from forgetless.data.datasets import load_source
from forgetless.support.validation import DataError

PATH = Path("folder/train")
REAL = os.environ.get("FORGETLESS_DATA", "")
needs_real_data = pytest.mark.skipif(
    not (Path(REAL or "nowhere") / "cifar-100-binary" / "train.bin").is_file(),
    reason="needs CIFAR-100 (binary version) in the folder FORGETLESS_DATA",
)


def make_rows(n_images: int, seed: int) -> bytes:
    rows = np.random.default_rng(seed).integers(0, 256, (n_images, ROW_BYTES), dtype=np.uint8)
    rows[:, 0] %= 20
    rows[:, 1] %= 100
    return rows.tobytes()


def pickled(rows: bytes, protocol: int = 2) -> bytes:
    table = np.frombuffer(rows, dtype=np.uint8).reshape(-1, ROW_BYTES)
    fields = {
        b"filenames": [b"image_%d.png" % index for index in range(len(table))],
        b"batch_label": b"one batch",
        b"fine_labels": table[:, 1].tolist(),
        b"coarse_labels": table[:, 0].tolist(),
        b"data": np.ascontiguousarray(table[:, 2:]),
    }
    return pickle.dumps(fields, protocol=protocol)


ROWS = (make_rows(5, seed=0), make_rows(3, seed=1))
PARTS = tuple(Subset(len(rows) // ROW_BYTES, hashlib.sha256(rows).hexdigest()) for rows in ROWS)
FORMS = [(BINARY, lambda rows: rows), (PYTHON, pickled)]
EXPECTED = np.frombuffer(ROWS[0], dtype=np.uint8).reshape(-1, ROW_BYTES)


def write_tarball(path: Path, members: dict[str, bytes]) -> Form:
    with tarfile.open(path, "w:gz") as tarball:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tarball.addfile(entry, io.BytesIO(content))
    form = BINARY if path.name.startswith("binary") else PYTHON
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return replace(form, tarball=replace(form.tarball, sha256=sha256))


def check(splits: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    (images, labels), (test_images, test_labels) = splits
    assert images.shape == (5, 3, 32, 32)
    assert test_images.shape == (3, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert labels.dtype == test_labels.dtype == torch.int64
    assert labels.tolist() == EXPECTED[:, 1].tolist()
    assert images.flatten(1).numpy().tobytes() == EXPECTED[:, 2:].tobytes()
    assert images[0, 2, 1, 7] == EXPECTED[0, 2 + 2 * 1024 + 32 + 7]  # colour, row, column


@pytest.mark.parametrize(("form", "encode"), FORMS, ids=["binary", "python"])
def test_both_forms_give_the_same_images(tmp_path: Path, form: Form, encode) -> None:
    paths = [tmp_path / name for name in form.file_names]
    for path, rows in zip(paths, ROWS):
        path.write_bytes(encode(rows))
    check(cifar.read_folder(form, PARTS, paths))


@pytest.mark.parametrize(("form", "encode"), FORMS, ids=["binary", "python"])
def test_tarballs_are_read_without_extraction(tmp_path: Path, form: Form, encode) -> None:
    path = tmp_path / f"{form.folder.split('-')[-1]}.tar.gz"
    members = {f"{form.folder}/{n}": encode(rows) for n, rows in zip(form.file_names, ROWS)}
    tarball_form = write_tarball(path, {f"{form.folder}/notes.txt": b"notes", **members})
    check(cifar.read_tarball(tarball_form, PARTS, [path]))
    assert list(tmp_path.iterdir()) == [path]


def test_a_changed_tarball_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "binary.tar.gz"
    form = write_tarball(path, {})
    path.write_bytes(path.read_bytes() + b"\x00")
    with pytest.raises(DataError, match=r"binary\.tar\.gz is truncated, corrupted"):
        cifar.read_tarball(form, PARTS, [path])


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"cifar-100-binary/train.bin": ROWS[0]},
        {"cifar-100-binary/train.bin": bytes(10**6), "cifar-100-binary/test.bin": ROWS[1]},
        {"train.bin": ROWS[0], "test.bin": ROWS[1]},
    ],
    ids=["empty", "half", "oversized", "elsewhere"],
)
def test_tarballs_without_the_files_are_refused(tmp_path: Path, members: dict[str, bytes]) -> None:
    form = write_tarball(tmp_path / "binary.tar.gz", members)
    with pytest.raises(DataError, match="has no usable file"):
        cifar.read_tarball(form, PARTS, [tmp_path / "binary.tar.gz"])


def test_what_is_no_tarball_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.tar.gz"
    for content in (b"", b"not a tarball", b"\x1f\x8b\x08\x00 neither"):
        path.write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        form = replace(BINARY, tarball=replace(BINARY.tarball, sha256=sha256))
        with pytest.raises(DataError, match=r"binary\.tar\.gz"):
            cifar.read_tarball(form, PARTS, [path])


@pytest.mark.parametrize(("form", "encode"), FORMS, ids=["binary", "python"])
@given(bit=st.integers(0, 8 * len(ROWS[0]) - 1))
def test_a_flipped_bit_in_the_rows_is_refused(form: Form, encode, bit: int) -> None:
    rows = bytearray(ROWS[0])
    rows[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(DataError, match="folder/train"):
        cifar.parse_part(form, PARTS[0], encode(bytes(rows)), PATH)


@pytest.mark.parametrize(("form", "encode"), FORMS, ids=["binary", "python"])
@given(length=st.integers(0, len(ROWS[0]) - 1))
def test_truncated_files_are_refused(form: Form, encode, length: int) -> None:
    with pytest.raises(DataError, match="folder/train"):
        cifar.parse_part(form, PARTS[0], encode(ROWS[0])[:length], PATH)


def test_labels_out_of_range_are_refused_even_with_the_right_checksum() -> None:
    rows = bytearray(ROWS[0])
    rows[1] = 100
    part = Subset(5, hashlib.sha256(rows).hexdigest())
    with pytest.raises(DataError, match="label 100"):
        cifar.parse_part(BINARY, part, bytes(rows), PATH)


@pytest.mark.parametrize(
    "changes",
    [
        {b"data": [1, 2, 3]},
        {b"data": np.zeros((5, 3071), dtype=np.uint8)},
        {b"data": np.zeros((4, 3072), dtype=np.uint8)},
        {b"fine_labels": 5},
        {b"fine_labels": [1, 2, 3, 4]},
        {b"fine_labels": [1, 2, 3, 4, 100]},
        {b"fine_labels": [1, 2, 3, 4, -1]},
        {b"fine_labels": [1, 2, 3, 4, True]},
        {b"coarse_labels": [1, 2, 3, 4, "5"]},
        {b"coarse_labels": None},
    ],
)
def test_fields_of_another_form_are_refused(changes: dict[bytes, object]) -> None:
    fields = {**pickle.loads(pickled(ROWS[0])), **changes}
    with pytest.raises(DataError, match="folder/train"):
        cifar.rows_from_pickle(pickle.dumps(fields, protocol=2), 5, PATH)


def test_a_pickle_of_something_else_is_refused() -> None:
    with pytest.raises(DataError, match="not a pickled dictionary"):
        cifar.rows_from_pickle(pickle.dumps([1], protocol=2), 5, PATH)


@needs_real_data
def test_the_real_dataset_is_read() -> None:
    images = load_source("cifar100", REAL, download=False)
    assert images.n_classes == 100
    assert images.train_images.shape == (50_000, 3, 32, 32)
    assert images.test_images.shape == (10_000, 3, 32, 32)
    assert images.train_labels.bincount().tolist() == [500] * 100
    assert images.test_labels.bincount().tolist() == [100] * 100


@needs_real_data
def test_the_real_dataset_in_its_python_form_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python").mkdir()
    for binary, python in zip(BINARY.file_names, PYTHON.file_names):
        rows = (Path(REAL) / "cifar-100-binary" / binary).read_bytes()
        (tmp_path / "cifar-100-python" / python).write_bytes(pickled(rows))
    ours = load_source("cifar100", tmp_path, download=False)
    real = load_source("cifar100", REAL, download=False)
    assert torch.equal(ours.train_images, real.train_images)
    assert torch.equal(ours.train_labels, real.train_labels)
    assert torch.equal(ours.test_images, real.test_images)
    assert torch.equal(ours.test_labels, real.test_labels)
