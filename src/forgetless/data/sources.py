"""Load the image datasets that tasks are made from: find, verify, and download them if needed."""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import platformdirs
from torch import Tensor

from forgetless.data.catalogue import SOURCES, Found, LabelledImages, Source
from forgetless.data.fetch import obtain
from forgetless.data.files import DamagedFileError, sha256_of
from forgetless.support.errors import ConfigError, DataError

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
    """Whether a dataset can be used, where it is (or the reason why not), and its size on disk."""

    name: str
    description: str
    available: bool
    where: str
    bytes: int


def load_source(
    name: str, data: Folder | None = None, *, download: bool = True, progress: bool | None = None
) -> ImageSet:
    """Load a dataset from the first place that has it, and verify it.

    The places are the folder `data` or else the one that FORGETLESS_DATA names, then the user's
    cache, then, if `download` is true, a download into the cache. `progress` shows or hides the
    progress bar of a download; None shows it if standard error is a terminal.
    """
    source = _source(name)
    named = _named_folder(data)
    if named is not None and source.package is None and source.find([named]) is None:
        # The user's own copy is never replaced silently, not even in part.
        source.reject_incomplete(named)
    found = _find(source, named)
    try:
        if found is None and download:
            obtain(name, source.origins, _cache_folder() / name, progress=progress, replace=False)
            found = source.find([_cache_folder()])
        if found is None:
            raise _not_found(source, named)
        return _image_set(source, found.read())
    except DamagedFileError as damaged:
        if _cache_folder() not in damaged.path.parents:
            raise
        raise DataError(
            f"{damaged}: delete it or run `forgetless data fetch {name}`, which replaces it"
        ) from damaged


def shared_source(name: str, data: Folder | None = None, *, download: bool = True) -> ImageSet:
    """As `load_source`, but unchanged files are read and verified once per process.

    All callers share these images: copy them before writing to them.
    """
    found = _find(_source(name), _named_folder(data))
    if found is None:
        return load_source(name, data, download=download)
    files = [(path, path.stat()) for path in found.paths]
    stamps = tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in files)
    return _read_once(name, None if data is None else Path(data), stamps)


@lru_cache(maxsize=1)
def _read_once(name: str, data: Path | None, stamps: tuple[tuple[Path, int, int], ...]) -> ImageSet:
    del stamps  # they distinguish files
    return load_source(name, data, download=False)


def find_source(name: str, data: Folder | None = None) -> Found | None:
    """Where a dataset is on this machine, not verified; None if it is nowhere."""
    return _find(_source(name), _named_folder(data))


def file_hashes(name: str, data: Folder | None = None) -> dict[str, str]:
    """SHA-256 of the files that a dataset is read from, by file name; empty if it is nowhere."""
    found = find_source(name, data)
    return {} if found is None else {path.name: sha256_of(path) for path in found.paths}


def status(data: Folder | None = None) -> list[SourceStatus]:
    """Which datasets are on this machine, verified."""
    named = _named_folder(data)
    return [_status_of(source, named) for source in SOURCES.values()]


def fetch(name: str, data: Folder | None = None, progress: bool | None = None) -> Path:
    """Make sure that a dataset is on disk and intact, and return the folder that has it.

    It goes to the folder `data` or else the one that FORGETLESS_DATA names, or else to the user's
    cache. Intact files stay; a damaged one is replaced in the cache, and rejected in a folder of
    the user's own.
    """
    source = _source(name)
    named = _named_folder(data)
    roots = _roots(source, named)[:1]
    while (found := source.find(roots)) is not None:
        try:
            found.read()
            return found.folder
        except DamagedFileError as damaged:
            if named is not None or source.package is not None:
                raise
            damaged.path.unlink(missing_ok=True)
    folder = roots[0] / name
    obtain(name, source.origins, folder, progress=progress, replace=named is None)
    return folder


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


def _roots(source: Source, named: Path | None) -> list[Path]:
    """The folders to search: a package's own, or the user's, then the cache."""
    if source.package is None:
        return [_cache_folder()] if named is None else [named, _cache_folder()]
    distribution, module = source.package
    spec = importlib.util.find_spec(module)  # which does not import it
    if spec is None or spec.origin is None:
        raise DataError(f"{source.name} comes with {distribution}, which is not installed")
    return [Path(spec.origin).parent]


def _find(source: Source, named: Path | None) -> Found | None:
    return source.find(_roots(source, named))


def _image_set(source: Source, splits: Sequence[LabelledImages]) -> ImageSet:
    (train_images, train_labels), (test_images, test_labels) = splits
    return ImageSet(train_images, train_labels, test_images, test_labels, source.n_classes)


def _not_found(source: Source, named: Path | None) -> DataError:
    folders = " or ".join(str(root) for root in _roots(source, named))
    return DataError(
        f"{source.name} was not found in {folders}: run `forgetless data fetch {source.name}`, or "
        f"put its files in a folder and pass --data DIR or set {DATA_VARIABLE} to that folder"
    )


def _status_of(source: Source, named: Path | None) -> SourceStatus:
    available, where, n_bytes = False, "not on this machine", 0
    try:
        if (found := _find(source, named)) is not None:
            n_bytes = sum(path.stat().st_size for path in found.paths)
            found.read()
            available, where = True, str(found.folder)
            if source.package is not None:
                where = f"comes with {source.package[0]}"
    except (DataError, OSError) as error:
        where = str(error)
    return SourceStatus(source.name, source.description, available, where, n_bytes)
