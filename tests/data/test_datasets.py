"""Where datasets are looked for, in which order, and what is said when they are not right."""

import gzip
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import platformdirs
import pytest
import torch

from forgetless.data import datasets
from forgetless.data.datasets import (
    SOURCES,
    fetch,
    file_hashes,
    find_source,
    load_source,
    shared_source,
    status,
)
from forgetless.data.files import IdxFile, PublishedFile
from forgetless.support.validation import ConfigError, DataError

SHAPES = {
    "train-images-idx3-ubyte": (6, 28, 28),
    "train-labels-idx1-ubyte": (6,),
    "t10k-images-idx3-ubyte": (4, 28, 28),
    "t10k-labels-idx1-ubyte": (4,),
}


def plain_idx(shape: tuple[int, ...], seed: int) -> bytes:
    values = np.random.default_rng(seed).integers(0, 10, shape, dtype=np.uint8)
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + values.tobytes()


def small_files(seed: int) -> dict[str, bytes]:
    return {name: plain_idx(shape, seed) for name, shape in SHAPES.items()}


def specs(content: dict[str, bytes]) -> tuple[IdxFile, ...]:
    return tuple(
        IdxFile(
            name,
            SHAPES[name],
            gzip_sha256=hashlib.sha256(gzip.compress(plain, mtime=0)).hexdigest(),
            sha256=hashlib.sha256(plain).hexdigest(),
        )
        for name, plain in content.items()
    )


MNIST, FASHION = small_files(1), small_files(2)


@dataclass
class Shelf:
    """An origin that has the files at hand."""

    content: dict[str, bytes]
    files: tuple[PublishedFile, ...]
    label: str = "the shelf"
    asked: list[str] = field(default_factory=list)

    def fetch(self, missing: Sequence[PublishedFile], folder: Path, progress: bool) -> list[str]:
        self.asked += [file.name for file in missing]
        folder.mkdir(parents=True, exist_ok=True)
        for file in missing:
            plain = self.content.get(file.name.removesuffix(".gz"))
            if plain is None:
                return [f"{file.name} is not on the shelf"]
            (folder / file.name).write_bytes(gzip.compress(plain, mtime=0))
        return []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(folder / name))
    monkeypatch.delenv("FORGETLESS_DATA", raising=False)
    return folder / "forgetless"


@pytest.fixture
def shelf(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Small datasets under the names of the large ones, with the folders of the large ones."""
    mnist, fashion = specs(MNIST), tuple(replace(idx, sha256=None) for idx in specs(FASHION))
    shelf = Shelf(dict(MNIST), tuple(idx.published for idx in mnist))
    layouts = datasets._idx_layouts
    small_mnist = replace(
        SOURCES["mnist"],
        layouts=layouts(mnist, ("mnist", "MNIST/raw"), fashion),
        origins=(shelf,),
    )
    small_fashion = replace(
        SOURCES["fashion-mnist"],
        layouts=layouts(fashion, ("fashion-mnist", "FashionMNIST/raw"), mnist),
        origins=(Shelf({}, tuple(idx.published for idx in fashion)),),
    )
    monkeypatch.setitem(SOURCES, "mnist", small_mnist)
    monkeypatch.setitem(SOURCES, "fashion-mnist", small_fashion)
    return shelf


def put(folder: Path, content: dict[str, bytes], packed: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, plain in content.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(plain, mtime=0))
        else:
            (folder / name).write_bytes(plain)
    return folder


def is_mnist(images: datasets.ImageSet) -> bool:
    pixels = MNIST["train-images-idx3-ubyte"][16:]
    assert images.train_images.shape == (6, 1, 28, 28)
    assert images.test_images.shape == (4, 1, 28, 28)
    assert images.test_labels.dtype == torch.int64
    return images.train_images.numpy().tobytes() == pixels


def test_an_unknown_name_lists_the_known_ones() -> None:
    for function in (load_source, find_source, fetch):
        with pytest.raises(
            ConfigError, match="'mnsit': did you mean 'mnist'\\? There are digits, mnist"
        ):
            function("mnsit")


@pytest.mark.parametrize("packed", [True, False], ids=["gzipped", "plain"])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
def test_layouts_that_people_have_are_found(
    tmp_path: Path, shelf: Shelf, folder: str, packed: bool
) -> None:
    put(tmp_path / "data" / folder, MNIST, packed)
    assert is_mnist(load_source("mnist", tmp_path / "data"))
    assert find_source("mnist", str(tmp_path / "data")).folder == tmp_path / "data" / folder
    assert shelf.asked == []


def test_runs_of_one_process_share_images_until_files_change(tmp_path: Path, shelf: Shelf) -> None:
    data = put(tmp_path / "data" / "mnist", MNIST).parent
    images = shared_source("mnist", data)
    assert is_mnist(images)
    assert shared_source("mnist", str(data)) is images
    assert load_source("mnist", data) is not images
    (data / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    with pytest.raises(DataError, match="t10k-labels"):
        shared_source("mnist", data)
    assert shelf.asked == []


def test_in_the_root_the_checksum_decides(tmp_path: Path, shelf: Shelf) -> None:
    put(tmp_path / "data", FASHION)
    assert find_source("mnist", tmp_path / "data") is None
    assert find_source("fashion-mnist", tmp_path / "data").folder == tmp_path / "data"
    assert load_source("fashion-mnist", tmp_path / "data").n_classes == 10
    assert is_mnist(load_source("mnist", tmp_path / "data"))
    assert len(shelf.asked) == 4
    # Gzipped files of the one beside plain files of the other: each is found.
    put(tmp_path / "data", MNIST, packed=False)
    assert find_source("mnist", tmp_path / "data").folder == tmp_path / "data"


def test_a_damaged_file_in_the_root_is_not_taken_for_another_dataset(
    tmp_path: Path, shelf: Shelf
) -> None:
    data = put(tmp_path / "data", MNIST)
    (data / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    with pytest.raises(DataError, match="t10k-labels"):
        load_source("mnist", data)


def test_plain_fashion_files_are_not_accepted(tmp_path: Path, shelf: Shelf) -> None:
    put(tmp_path / "data" / "fashion-mnist", FASHION, packed=False)
    assert find_source("fashion-mnist", tmp_path / "data") is None


def test_the_argument_goes_before_the_variable(
    tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put(tmp_path / "first" / "mnist", MNIST)
    second = put(tmp_path / "second" / "mnist", MNIST)
    monkeypatch.setenv("FORGETLESS_DATA", str(second.parent))
    assert find_source("mnist").folder == second
    assert find_source("mnist", first.parent).folder == first
    assert fetch("mnist") == second
    monkeypatch.setenv("FORGETLESS_DATA", "")
    assert find_source("mnist") is None


def test_a_named_folder_must_exist(
    tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        for function in (load_source, find_source, fetch):
            with pytest.raises(ConfigError, match=f"data names .*{name}"):
                function("mnist", tmp_path / name)
    with pytest.raises(ConfigError, match="data names ''"):
        load_source("mnist", "")
    monkeypatch.setenv("FORGETLESS_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"FORGETLESS_DATA names .*nowhere"):
        status()


def test_what_is_missing_is_downloaded_into_the_cache(
    tmp_path: Path, cache: Path, shelf: Shelf
) -> None:
    (tmp_path / "data").mkdir()
    assert is_mnist(load_source("mnist", tmp_path / "data"))
    assert find_source("mnist", tmp_path / "data").folder == cache / "mnist"
    assert is_mnist(load_source("mnist", download=False))
    assert len(shelf.asked) == 4
    assert list((tmp_path / "data").iterdir()) == []


def test_a_download_that_was_interrupted_goes_on(cache: Path, shelf: Shelf) -> None:
    put(cache / "mnist", dict(list(MNIST.items())[:3]))
    assert is_mnist(load_source("mnist"))
    assert shelf.asked == ["t10k-labels-idx1-ubyte.gz"]


def test_without_download_it_says_where_it_looked(
    tmp_path: Path, cache: Path, shelf: Shelf
) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError) as caught:
        load_source("mnist", tmp_path / "data", download=False)
    assert f"mnist was not found in {tmp_path / 'data'} or {cache}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert shelf.asked == []


@pytest.mark.parametrize("damage", [b"", b"cut"], ids=["empty", "other"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_users_damaged_file_is_named_and_never_replaced(
    tmp_path: Path, shelf: Shelf, name: str, damage: bytes
) -> None:
    folder = put(tmp_path / "data" / "mnist", MNIST)
    (folder / f"{name}.gz").write_bytes(damage)
    for function in (load_source, fetch):
        with pytest.raises(DataError, match=f"{folder / name}.gz is truncated, corrupted"):
            function("mnist", tmp_path / "data")
    assert (folder / f"{name}.gz").read_bytes() == damage
    assert shelf.asked == []


def test_the_users_incomplete_copy_is_an_error_but_can_be_completed(
    tmp_path: Path, shelf: Shelf
) -> None:
    folder = put(tmp_path / "data" / "mnist", MNIST)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=f"{folder} is incomplete: t10k-labels-idx1-ubyte.gz"):
        load_source("mnist", tmp_path / "data")
    assert fetch("mnist", tmp_path / "data") == folder
    assert shelf.asked == ["t10k-labels-idx1-ubyte.gz"]
    assert is_mnist(load_source("mnist", tmp_path / "data"))


@pytest.mark.parametrize("kept", [4, 2], ids=["complete", "incomplete"])
def test_a_damaged_file_in_the_cache_is_named_and_fetch_replaces_it(
    cache: Path, shelf: Shelf, kept: int
) -> None:
    folder = put(cache / "mnist", dict(list(MNIST.items())[:kept]))
    damaged = folder / "train-labels-idx1-ubyte.gz"
    damaged.write_bytes(b"damaged")
    with pytest.raises(DataError, match=f"{damaged} .*run `forgetless data fetch mnist`"):
        load_source("mnist")
    assert damaged.read_bytes() == b"damaged"
    assert fetch("mnist") == folder
    assert len(shelf.asked) == 5 - kept
    assert is_mnist(load_source("mnist", download=False))
    assert fetch("mnist") == folder
    assert len(shelf.asked) == 5 - kept


def test_a_failed_download_names_the_dataset_and_what_was_tried(shelf: Shelf) -> None:
    with pytest.raises(DataError, match=r"fashion-mnist could not be downloaded \(tried the shelf"):
        load_source("fashion-mnist")


def test_status_tells_what_there_is(tmp_path: Path, cache: Path, shelf: Shelf) -> None:
    put(tmp_path / "data" / "mnist", MNIST)
    fashion = put(cache / "fashion-mnist", FASHION)
    rows = {row.name: row for row in status(tmp_path / "data")}
    assert list(rows) == list(SOURCES)
    assert {name: row.available for name, row in rows.items()} == {
        "digits": True,
        "mnist": True,
        "fashion-mnist": True,
        "cifar10": False,
        "cifar100": False,
    }
    assert rows["mnist"].where == str(tmp_path / "data" / "mnist")
    assert rows["mnist"].bytes == sum(
        path.stat().st_size for path in (tmp_path / "data" / "mnist").iterdir()
    )
    assert rows["digits"].where == "comes with scikit-learn"
    assert rows["digits"].bytes > 10_000
    assert (rows["cifar100"].where, rows["cifar100"].bytes) == ("not on this machine", 0)
    (fashion / "train-images-idx3-ubyte.gz").write_bytes(b"damaged")
    damaged = {row.name: row for row in status(tmp_path / "data")}["fashion-mnist"]
    assert not damaged.available
    assert "train-images-idx3-ubyte.gz is truncated" in damaged.where


def test_file_hashes_are_those_of_the_files_that_are_read():
    file = find_source("digits").paths[0]
    assert file_hashes("digits") == {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}


def test_a_dataset_that_is_nowhere_has_no_hashes(tmp_path, monkeypatch):
    monkeypatch.setattr("forgetless.data.datasets._cache_folder", lambda: tmp_path)
    assert file_hashes("mnist", tmp_path) == {}
