"""CIFAR-10 in small files of the publisher's layout, from the folder and from both tarballs."""

import hashlib
import io
import pickle
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from forgetless import DataError, scenario
from forgetless.data import cifar10, datasets
from forgetless.data.cifar10 import BINARY, PYTHON, ROW_BYTES

N = 10  # images in a file


def rows(seed):
    table = np.random.default_rng(seed).integers(0, 256, (N, ROW_BYTES), dtype=np.uint8)
    table[:, 0] = np.arange(N)  # one of each class
    return table


TABLES = [rows(seed) for seed in range(6)]


def pickled(table, protocol=2):
    fields = {
        b"batch_label": b"one batch",
        b"labels": table[:, 0].tolist(),
        b"data": np.ascontiguousarray(table[:, 1:]),
        b"filenames": [b"image_%d.png" % i for i in range(len(table))],
    }
    return pickle.dumps(fields, protocol=protocol)


CONTENTS = {"py": [pickled(t) for t in TABLES], "bin": [t.tobytes() for t in TABLES]}
FORMS = {"py": PYTHON, "bin": BINARY}


def small(kind, tarball=b""):
    """The form of files of ten images."""
    form, sha256 = FORMS[kind], hashlib.sha256(tarball).hexdigest()
    md5 = [hashlib.md5(c, usedforsecurity=False).hexdigest() for c in CONTENTS[kind]]
    tarball = replace(form.tarball, sha256=sha256)
    return replace(form, n_images=N, tarball=tarball, md5=tuple(md5))


def packed(kind, contents=None):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tarball:
        named = zip(FORMS[kind].file_names, contents or CONTENTS[kind], strict=False)
        for name, content in named:
            entry = tarfile.TarInfo(f"{FORMS[kind].folder}/{name}")
            entry.size = len(content)
            tarball.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def check(splits):
    (images, labels), (test_images, test_labels) = splits
    expected = np.concatenate(TABLES[:5])
    assert images.shape == (50, 3, 32, 32)
    assert labels.tolist() == expected[:, 0].tolist()
    assert images.flatten(1).numpy().tobytes() == expected[:, 1:].tobytes()
    assert images[3, 2, 1, 7] == expected[3, 1 + 2 * 1024 + 32 + 7]  # colour, row, column
    assert test_images.flatten(1).numpy().tobytes() == TABLES[5][:, 1:].tobytes()
    assert test_labels.dtype == torch.int64


def folder_of(root, contents):
    folder = root / PYTHON.folder
    folder.mkdir()
    paths = [folder / name for name in PYTHON.file_names]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def test_the_folder_of_pickles(tmp_path):
    check(cifar10.read_folder(small("py"), folder_of(tmp_path, CONTENTS["py"])))


@pytest.mark.parametrize("kind", FORMS)
def test_tarballs_are_read_without_extraction(kind, tmp_path):
    path = tmp_path / "images.tar.gz"
    path.write_bytes(packed(kind))
    check(cifar10.read_tarball(small(kind, path.read_bytes()), [path]))
    assert list(tmp_path.iterdir()) == [path]


def test_a_changed_file_is_refused_with_its_name(tmp_path):
    paths = folder_of(tmp_path, CONTENTS["py"])
    paths[2].write_bytes(CONTENTS["py"][3])
    with pytest.raises(DataError, match=r"data_batch_3 is truncated, .*\(MD5 "):
        cifar10.read_folder(small("py"), paths)
    tarball = tmp_path / "images.tar.gz"
    tarball.write_bytes(packed("bin") + b"\0")
    with pytest.raises(DataError, match=r"images\.tar\.gz is truncated.*\(SHA-256 "):
        cifar10.read_tarball(small("bin", packed("bin")), [tarball])


@pytest.mark.parametrize(
    ("kind", "spoil", "message"),
    [
        ("bin", lambda c: c[:-1], "bytes instead of 30730"),
        ("bin", lambda c: b"\x0b" + c[1:], "label 11, which must be below 10"),
        ("py", lambda c: pickle.dumps([1], protocol=2), "is not a pickled dictionary"),
        ("py", lambda c: pickle.dumps({b"labels": [1]}, protocol=2), "has no images of shape"),
        ("py", lambda c: pickled(TABLES[0][:3]), "has no images of shape"),
    ],
)
def test_files_with_a_mistake_inside_are_one_clear_error(kind, spoil, message, tmp_path):
    contents = [spoil(CONTENTS[kind][0]), *CONTENTS[kind][1:]]
    path = tmp_path / "images.tar.gz"
    path.write_bytes(packed(kind, contents))
    with pytest.raises(DataError, match=message):
        cifar10.read_tarball(small(kind, path.read_bytes()), [path])
    path.write_bytes(packed(kind, contents[:4]))
    with pytest.raises(DataError, match="has no usable file"):
        cifar10.read_tarball(small(kind, path.read_bytes()), [path])


def test_split_cifar10_has_five_tasks_of_two_classes(tmp_path, monkeypatch):
    folder_of(tmp_path, CONTENTS["py"])
    monkeypatch.setattr(cifar10, "PYTHON", small("py"))
    source = replace(datasets.SOURCES["cifar10"], layouts=datasets._cifar10_layouts())
    monkeypatch.setitem(datasets.SOURCES, "cifar10", source)
    tasks = scenario("split-cifar10", data=tmp_path, setting="class", full_head=True)
    assert (tasks.n_tasks, tasks.n_outputs, tasks.input_shape) == (5, 10, (3, 32, 32))
    third = tasks.task(2, [0])
    assert sorted(set(third.train.labels.tolist())) == [4, 5]
    assert len(third.train) == 10
    pixel = TABLES[0][4, 1] / 255  # of the first image of class 4, red
    assert third.train.inputs[0, 0, 0, 0].item() == pytest.approx((pixel - 0.491) / 0.247, rel=1e-5)
