"""The benchmarks: an image source turned into a sequence of tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from forgetless.data.sources import SOURCES, ImageSet, shared_source
from forgetless.data.tasks import Scenario, Split, Task
from forgetless.data.transforms import normalize, pad, rotate
from forgetless.support.errors import ConfigError, require
from forgetless.support.options import check_options, flag, option
from forgetless.support.streams import stream
from forgetless.support.validation import FINITE, whole


@dataclass(frozen=True, kw_only=True)
class ScenarioOptions:
    """How a source becomes tasks."""

    tasks: int = option(5, "How many tasks are learned one after another.", accepted=whole(1))
    step_degrees: float = option(
        5.0, "Rotated: each task is turned by this much more.", accepted=FINITE
    )
    classes_per_task: int = option(2, "Split: how many classes a task has.", accepted=whole(1))
    train_per_class: int = option(
        0,
        "Training images of each class, the first ones of the file; 0 takes all.",
        accepted=whole(0),
    )
    validation_per_class: int = option(
        0,
        "Hold out so many of them, the last ones, and measure accuracy there, not on the test set.",
        accepted=whole(0),
    )


@dataclass(frozen=True)
class ImageView:
    """How a source's images are prepared for a network."""

    padding: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


# MNIST and CIFAR-100 as the paper's code prepares them.
LOOKS: dict[str, ImageView] = {
    "digits": ImageView(0, (0.305,), (0.376,)),
    "mnist": ImageView(2, (0.1,), (0.2752,)),
    "fashion-mnist": ImageView(2, (0.219,), (0.331,)),
    "cifar100": ImageView(0, (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
}


class _ImageScenario(Scenario):
    """What the image benchmarks share: padded images of the chosen classes, in memory once."""

    def __init__(
        self, name: str, images: ImageSet, look: ImageView, options: ScenarioOptions
    ) -> None:
        self.name = name
        self.n_tasks = options.tasks
        self.options = options
        self.look = look
        kept = first_of_each_class(images.train_labels, images.n_classes, options.train_per_class)
        train = images.train_images[kept], images.train_labels[kept]
        test = images.test_images, images.test_labels.clone()  # the images are shared
        if options.validation_per_class:
            train, test = held_out(*train, images.n_classes, options.validation_per_class)
        self.train = pad(train[0], look.padding), train[1]
        self.test = pad(test[0], look.padding), test[1]
        self.input_shape = tuple(self.train[0].shape[1:])
        self.n_outputs = images.n_classes

    def classes(self, index: int) -> range:
        return range(self.n_outputs)

    def ready(self, images: Tensor) -> Tensor:
        return normalize(images, self.look.mean, self.look.std)


@final
class Rotated(_ImageScenario):
    """Task t shows all images turned by t times the same angle."""

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        degrees = index * self.options.step_degrees
        train, test = (
            Split(self.ready(rotate(images, degrees)), labels)
            for images, labels in (self.train, self.test)
        )
        return Task(f"{degrees:g}°", train, test, self.classes(index))


@final
class Permuted(_ImageScenario):
    """Task 1 shows the images as they are, each later one their pixels in an order of its own.

    A pixel keeps its channels together; each seed draws its own orders.
    """

    def __init__(
        self, name: str, images: ImageSet, look: ImageView, options: ScenarioOptions
    ) -> None:
        super().__init__(name, images, look, options)
        self._ready = [(self.ready(x), y) for x, y in (self.train, self.test)]

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        channels, height, width = self.input_shape
        pixels = height * width
        orders = None
        if index > 0:
            draws = [torch.randperm(pixels, generator=stream(s, "pixels", index)) for s in seeds]
            offsets = pixels * torch.arange(channels).view(1, -1, 1)
            orders = (torch.stack(draws).unsqueeze(1) + offsets).flatten(1)
        train, test = (Split(x, y, orders) for x, y in self._ready)
        return Task(f"permutation {index}", train, test, self.classes(index))


@final
class SplitClasses(_ImageScenario):
    """Each task has the next few classes, in the order of their labels, and a head of its own."""

    def __init__(
        self, name: str, images: ImageSet, look: ImageView, options: ScenarioOptions
    ) -> None:
        wanted = options.tasks * options.classes_per_task
        if wanted > images.n_classes:
            raise ConfigError(
                f"{options.tasks} tasks of {options.classes_per_task} classes need {wanted} "
                f"classes, and {name} has {images.n_classes}"
            )
        super().__init__(name, images, look, options)
        self.n_outputs = wanted

    def classes(self, index: int) -> range:
        width = self.options.classes_per_task
        return range(index * width, (index + 1) * width)

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        classes = self.classes(index)
        splits = []
        for images, labels in (self.train, self.test):
            chosen = (labels >= classes.start) & (labels < classes.stop)
            splits.append(Split(self.ready(images[chosen]), labels[chosen]))
        names = f"classes {classes.start}-{classes.stop - 1}"
        return Task(names, splits[0], splits[1], classes)


_Maker = Callable[[str, ImageSet, ImageView, ScenarioOptions], Scenario]
FAMILIES: dict[str, tuple[str, _Maker]] = {
    "rotated": ("turned a little further in each task", Rotated),
    "permuted": ("with the pixels in a new order in each task", Permuted),
    "split": ("some classes in each task, a head for each", SplitClasses),
}

# The options that only one family has a use for.
_OF_ONE_FAMILY = {"step_degrees": "rotated", "classes_per_task": "split"}

SCENARIOS: dict[str, str] = {
    f"{family}-{source}": f"{source}, {what}"
    for family, (what, _) in FAMILIES.items()
    for source in SOURCES
}


def build_scenario(
    name: str, options: ScenarioOptions, data: Path | None = None, *, download: bool = True
) -> Scenario:
    """The benchmark of that name, its images found on disk or downloaded.

    Arguments:
        name: a family and a source, such as "rotated-mnist".
        options: how many tasks, and what they are.
        data: folder to look for the source in first.
        download: fetch the source if it is not on disk.
    """
    if name not in SCENARIOS:
        raise ConfigError(f"unknown scenario {name!r}; there are {', '.join(SCENARIOS)}")
    check_options(ScenarioOptions, vars(options), flag)
    family, source = name.split("-", 1)
    images = shared_source(source, data, download=download)
    return FAMILIES[family][1](name, images, LOOKS[source], options)


def unused_by_scenario(name: str) -> set[str]:
    """The options that the benchmark of that name does not use."""
    return {o for o, family in _OF_ONE_FAMILY.items() if not name.startswith(f"{family}-")}


def grows_with_tasks(name: str) -> bool:
    """Whether each task of a benchmark brings outputs, so that a network is for so many tasks."""
    return "classes_per_task" not in unused_by_scenario(name)


def first_of_each_class(labels: Tensor, n_classes: int, count: int) -> Tensor:
    """Indices of the first `count` samples of each class (all for 0), in file order."""
    if count == 0:
        return torch.arange(len(labels))
    fewest = int(torch.bincount(labels, minlength=n_classes).min())
    require(count <= fewest, "--train-per-class", count, f"at most {fewest} with this source")
    members = [torch.nonzero(labels == c).flatten()[:count] for c in range(n_classes)]
    return torch.cat(members).sort().values


def held_out(
    images: Tensor, labels: Tensor, n_classes: int, count: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The images without the last `count` of each class, and those: two splits in file order."""
    fewest = int(torch.bincount(labels, minlength=n_classes).min())
    accepted = f"less than the {fewest} training images of a class"
    require(count < fewest, "--validation-per-class", count, accepted)
    last = torch.zeros(len(labels), dtype=torch.bool)
    for c in range(n_classes):
        last[torch.nonzero(labels == c).flatten()[-count:]] = True
    return (images[~last], labels[~last]), (images[last], labels[last])
