"""Loading the image datasets that tasks are made from: found, verified, and fetched if need be."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import platformdirs
from torch import Tensor

from forgetless.data.catalogue import (
    SOURCES,
    Found,
    LabelledImages,
    Source,
    find,
    refuse_incomplete,
)
from forgetless.data.fetch import obtain
from forgetless.data.files import DamagedFileError, remove, sha256_of
from forgetless.support.errors import ConfigError, DataError

__all__ = [
    "SOURCES",
    "ImageSet",
    "Source",
    "SourceStatus",
    "fetch",
    "file_hashes",
    "load_source",
    "locate",
    "shared_source",
    "status",
]

DATA_VARIABLE = "FORGETLESS_DATA"
Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class ImageSet:
    """A dataset of images: uint8 (n, channels, height, width), with int64 labels (n,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    n_classes: int


@dataclass(frozen=True)
class SourceStatus:
    """Whether a dataset can be used now, where it is (or what is wrong), and its size on disk."""

    name: str
    description: str
    available: bool
    where: str
    bytes: int


def load_source(
    name: str, data: Folder | None = None, *, download: bool = True, progress: bool | None = None
) -> ImageSet:
    """Load a dataset by its name from the first place that has it, verified before use.

    The places are the folder `data` or else the one that FORGETLESS_DATA names, then the user's
    cache, then, if `download` is true, a download into the cache. `progress` shows or hides the
    progress bar of a download; None shows it when standard error is a terminal.
    """
    source = _source(name)
    named, cache = _named_folder(data), _cache_folder()
    if source.embedded is not None:
        return _image_set(source, source.embedded.load())
    if named is not None:
        if (found := find(source.layouts, named)) is not None:
            return _image_set(source, found.read())
        # The user's own copy is never replaced silently, not even in part.
        refuse_incomplete(source.layouts, named)
    with _advice_on_cache(source):
        if (found := find(source.layouts, cache)) is None and download:
            obtain(name, source.origins, cache / name, progress=progress, replace=False)
            found = find(source.layouts, cache)
        if found is None:
            raise _not_found(source, [cache] if named is None else [named, cache])
        return _image_set(source, found.read())


def shared_source(name: str, data: Folder | None = None, *, download: bool = True) -> ImageSet:
    """As `load_source`, but files that have not changed since are not read and verified again.

    Runs of one process share these images: whoever wants to write to them takes a copy.
    """
    found = _find_anywhere(_source(name), _named_folder(data))
    if found is None:  # to be downloaded, or inside a package
        return load_source(name, data, download=download)
    files = [(path, path.stat()) for path in found.paths]
    stamps = tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in files)
    return _read_once(name, None if data is None else Path(data), stamps)


@lru_cache(maxsize=1)
def _read_once(name: str, data: Path | None, stamps: tuple[tuple[Path, int, int], ...]) -> ImageSet:
    del stamps  # they tell files apart
    return load_source(name, data, download=False)


def locate(name: str, data: Folder | None = None) -> Path | None:
    """The folder where a dataset is now, or None if it is nowhere or inside a package."""
    found = _find_anywhere(_source(name), _named_folder(data))
    return None if found is None else found.folder


def file_hashes(name: str, data: Folder | None = None) -> dict[str, str]:
    """SHA-256 of the files that a dataset is read from, by file name; empty if it is nowhere."""
    source = _source(name)
    if source.embedded is not None:
        paths: tuple[Path, ...] = (source.embedded.path(name),)
    else:
        found = _find_anywhere(source, _named_folder(data))
        paths = () if found is None else found.paths
    return {path.name: sha256_of(path) for path in paths}


def status(data: Folder | None = None) -> list[SourceStatus]:
    """What there is of each dataset on this machine; the files are verified to say so."""
    named = _named_folder(data)
    return [_status_of(source, named) for source in SOURCES.values()]


def fetch(name: str, data: Folder | None = None, progress: bool | None = None) -> Path:
    """Make sure that a dataset is on disk and intact, and give the folder that has it.

    It goes to the folder `data` or else the one that FORGETLESS_DATA names, or else to the user's
    cache. What is there and intact stays; a damaged file is replaced in the cache, and refused in
    a folder of the user's own.
    """
    source = _source(name)
    if source.embedded is not None:
        return source.embedded.path(name).parent
    named = _named_folder(data)
    root = _cache_folder() if named is None else named
    while (found := find(source.layouts, root)) is not None:
        try:
            found.read()
        except DamagedFileError as damaged:
            if named is not None:
                raise
            remove(damaged.path)
        else:
            return found.folder
    obtain(name, source.origins, root / name, progress=progress, replace=named is None)
    return root / name


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise ConfigError(f"there is no dataset {name!r}: choose one of {', '.join(SOURCES)}")
    return SOURCES[name]


def _named_folder(data: Folder | None) -> Path | None:
    """The folder that the user named, by argument or by environment variable; it must exist."""
    named = os.environ.get(DATA_VARIABLE, "") if data is None else os.fspath(data)
    if data is None and not named:
        return None
    folder = Path(named).expanduser()
    if not named or not folder.is_dir():
        origin = DATA_VARIABLE if data is None else "data"
        raise ConfigError(f"{origin} names {named!r}, which is not a folder that exists")
    return folder


def _cache_folder() -> Path:
    return Path(platformdirs.user_cache_dir("forgetless"))


def _find_anywhere(source: Source, named: Path | None) -> Found | None:
    roots = [_cache_folder()] if named is None else [named, _cache_folder()]
    return next((found for root in roots if (found := find(source.layouts, root))), None)


def _image_set(source: Source, splits: Sequence[LabelledImages]) -> ImageSet:
    (train_images, train_labels), (test_images, test_labels) = splits
    return ImageSet(train_images, train_labels, test_images, test_labels, source.n_classes)


@contextmanager
def _advice_on_cache(source: Source) -> Iterator[None]:
    """Add to the error about a damaged file in the cache what can be done about it."""
    try:
        yield
    except DamagedFileError as damaged:
        raise DataError(
            f"{damaged}: delete it or run `forgetless data fetch {source.name}`, which replaces it"
        ) from damaged


def _not_found(source: Source, roots: Sequence[Path]) -> DataError:
    folders = " or ".join(str(root) for root in roots)
    return DataError(
        f"{source.name} was not found in {folders}: run `forgetless data fetch {source.name}`, or "
        f"put its files in a folder and pass --data DIR or set {DATA_VARIABLE} to that folder"
    )


def _status_of(source: Source, named: Path | None) -> SourceStatus:
    available, where, n_bytes = False, "not on this machine", 0
    try:
        if source.embedded is not None:
            n_bytes = source.embedded.path(source.name).stat().st_size
            available, where = True, f"comes with {source.embedded.package}"
        elif (found := _find_anywhere(source, named)) is not None:
            n_bytes = found.n_bytes()
            found.read()
            available, where = True, str(found.folder)
    except (DataError, OSError) as error:
        where = str(error)
    return SourceStatus(source.name, source.description, available, where, n_bytes)
