"""The datasets: scikit-learn's digits, the layouts of CIFAR-100, the real MNIST."""

import gzip
import os
import sys
from pathlib import Path

import numpy as np
import platformdirs
import pytest
import sklearn.datasets
import torch

from forgetless.data import cifar
from forgetless.data.datasets import SOURCES, fetch, find_source, load_source
from forgetless.support.validation import DataError

REAL = os.environ.get("FORGETLESS_DATA", "")


@pytest.fixture(autouse=True)
def _no_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache"))
    monkeypatch.delenv("FORGETLESS_DATA", raising=False)


def test_digits_come_with_scikit_learn() -> None:
    images = load_source("digits", download=False)
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    test = np.arange(len(labels)) % 5 == 4
    assert images.train_labels.tolist() == labels[~test].tolist()
    theirs = np.rint(pixels[test] * 255 / 16).astype(np.uint8)
    assert images.test_images.flatten(1).numpy().tobytes() == theirs.tobytes()
    assert images.n_classes == 10
    assert images.train_images.shape == (1438, 1, 8, 8)
    assert images.test_images.shape == (359, 1, 8, 8)
    assert images.train_images.dtype == torch.uint8
    assert (int(images.train_images.min()), int(images.train_images.max())) == (0, 255)
    assert images.train_labels[:6].tolist() == [0, 1, 2, 3, 5, 6]
    assert images.test_labels[:3].tolist() == [4, 9, 4]
    # The first row of the first image is 0 0 5 13 9 1 0 0, of at most 16.
    assert images.train_images[0, 0, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]
    assert find_source("digits").folder == fetch("digits")
    assert (fetch("digits") / "digits.csv.gz").is_file()


def test_digits_without_scikit_learn_are_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match="scikit-learn, which is not installed"):
        load_source("digits")


@pytest.mark.parametrize(
    "files",
    [
        ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
        ("cifar-100-python/train", "cifar-100-python/test"),
        ("train.bin", "test.bin"),
        ("train", "test"),
        ("cifar-100-binary.tar.gz",),
        ("cifar-100-python.tar.gz",),
        ("cifar100/cifar-100-binary.tar.gz",),
        ("cifar100/cifar-100-python.tar.gz",),
    ],
)
def test_cifar_layouts_are_found_and_damage_is_named(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    for file in files:
        (tmp_path / "data" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / file).write_bytes(b"damaged")
    path = tmp_path / "data" / files[0]
    assert find_source("cifar100", tmp_path / "data").folder == path.parent
    with pytest.raises(DataError, match=f"{path} "):
        load_source("cifar100", tmp_path / "data")
    with pytest.raises(DataError, match=f"{path} "):
        fetch("cifar100", tmp_path / "data")


def test_folders_named_train_and_test_are_not_cifar(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / "data" / name).mkdir(parents=True)
    assert find_source("cifar100", tmp_path / "data") is None


def test_each_source_can_be_fetched_into_a_folder_where_it_is_found() -> None:
    for source in SOURCES.values():
        folders = {layout.folder: layout for layout in source.layouts}
        assert (source.package is None) == (source.name in folders)
        for origin in source.origins:
            needed = {file.name for file in origin.files}
            assert any(
                all(needed.intersection(names) for names in layout.files)
                for layout in source.layouts
                if layout.folder == source.name
            )
    assert cifar.BINARY.tarball.sha256 != cifar.PYTHON.tarball.sha256


@pytest.mark.skipif(
    not (Path(REAL or "nowhere") / "mnist").is_dir(),
    reason="needs MNIST in the folder FORGETLESS_DATA",
)
@pytest.mark.parametrize("packed", [True, False], ids=["gzipped", "plain"])
def test_the_real_mnist_is_read(tmp_path: Path, packed: bool) -> None:
    folder = Path(REAL)
    if not packed:
        folder = tmp_path / "data"
        folder.mkdir()
        for path in (Path(REAL) / "mnist").glob("*.gz"):
            (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    images = load_source("mnist", folder, download=False)
    assert images.train_images.shape == (60_000, 1, 28, 28)
    assert images.test_images.shape == (10_000, 1, 28, 28)
    assert images.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert images.test_labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert images.train_labels.bincount().tolist()[:3] == [5923, 6742, 5958]
    assert int(images.train_images[0].sum()) == 27525
