"""The benchmarks: an image source turned into a sequence of tasks."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cache
from inspect import Parameter
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from forgetless.data.datasets import SOURCES, ImageSet, shared_source
from forgetless.data.tasks import SETTINGS, Scenario, Split, Task, own_settings
from forgetless.support.plugins import (
    accepted,
    import_path,
    is_in_file,
    make,
    plugin,
    short_name,
    wrong_kind,
)
from forgetless.support.streams import stream
from forgetless.support.validation import (
    FINITE,
    ConfigError,
    check_options,
    flag,
    option,
    require,
    select_options,
    whole,
)


@dataclass(frozen=True, kw_only=True)
class ScenarioOptions:
    """How a source becomes tasks."""

    tasks: int = option(5, "Number of tasks, learned one after another.", accepted=whole(1))
    step_degrees: float = option(
        5.0, "Rotated: angle between one task and the next.", accepted=FINITE
    )
    classes_per_task: int = option(2, "Split: classes per task.", accepted=whole(1))
    setting: str = option(
        "task",
        "Split: outputs that compete for a sample: task (its task's), class (all seen so far), or "
        "domain (all of one shared head; labels within the task).",
        choices=SETTINGS,
    )
    train_per_class: int = option(
        0,
        "Training images of each class, the first in the file; 0 takes all.",
        accepted=whole(0),
    )
    validation_per_class: int = option(
        0,
        "Hold out this many of them, drawn at random; measure accuracy on them, not the test set.",
        accepted=whole(0),
    )
    validation_seed: int = option(0, "Seed of the choice of validation images.", accepted=whole(0))


@dataclass(frozen=True)
class ImageView:
    """How a source's images are prepared: a black border, then (x − mean) / std per channel."""

    padding: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


# MNIST and CIFAR-100 as in the paper's code.
VIEWS: dict[str, ImageView] = {
    "digits": ImageView(0, (0.305,), (0.376,)),
    "mnist": ImageView(2, (0.1,), (0.2752,)),
    "fashion-mnist": ImageView(2, (0.219,), (0.331,)),
    "cifar100": ImageView(0, (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
}


class _ImageScenario(Scenario):
    """An image source as tasks: padded images of the chosen samples, in memory once."""

    def __init__(
        self, name: str, images: ImageSet, view: ImageView, options: ScenarioOptions
    ) -> None:
        self.name = name
        self.n_tasks = options.tasks
        self.options = options
        self.recipe = scenario_settings(name, options)
        self.setting = self.recipe["setting"]
        self.view = view
        chosen = first_of_each_class(images.train_labels, images.n_classes, options.train_per_class)
        train = images.train_images[chosen], images.train_labels[chosen]
        test = images.test_images, images.test_labels.clone()  # the images are shared
        if options.validation_per_class:
            train, test = validation_split(*train, images.n_classes, options)
            self.measured_on = "validation"
        self.train = pad(train[0], (view.padding,) * 4), train[1]
        self.test = pad(test[0], (view.padding,) * 4), test[1]
        self.input_shape = tuple(self.train[0].shape[1:])
        self.n_outputs = images.n_classes

    def classes(self, index: int) -> range:
        return range(self.n_outputs)

    def ready(self, images: Tensor) -> Tensor:
        """Images as inputs of a network."""
        return normalize(images, self.view.mean, self.view.std)


@final
class Rotated(_ImageScenario):
    """Task t shows all images rotated by t times the same angle."""

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        degrees = index * self.options.step_degrees
        train, test = (
            Split(self.ready(rotate(images, degrees)), labels)
            for images, labels in (self.train, self.test)
        )
        return Task(f"{degrees:g}°", train, test)


@final
class Permuted(_ImageScenario):
    """Task 1 shows the images unchanged, each later one with their pixels in a new order.

    The channels of a pixel stay together; each seed draws its own orders.
    """

    def __init__(
        self, name: str, images: ImageSet, view: ImageView, options: ScenarioOptions
    ) -> None:
        super().__init__(name, images, view, options)
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
        return Task(f"permutation {index}", train, test)


@final
class SplitClasses(_ImageScenario):
    """Each task has the next few classes, in the order of their labels.

    In the settings "task" and "class" every class has its own output; in "domain" the tasks share
    as many outputs as one of them has classes.
    """

    def __init__(
        self, name: str, images: ImageSet, view: ImageView, options: ScenarioOptions
    ) -> None:
        wanted = options.tasks * options.classes_per_task
        if wanted > images.n_classes:
            raise ConfigError(
                f"{options.tasks} tasks of {options.classes_per_task} classes need {wanted} "
                f"classes, and {name} has {images.n_classes}"
            )
        super().__init__(name, images, view, options)
        self.n_outputs = options.classes_per_task if self.setting == "domain" else wanted

    def classes(self, index: int) -> range:
        return range(self.n_outputs) if self.setting == "domain" else self._labels(index)

    def _labels(self, index: int) -> range:
        width = self.options.classes_per_task
        return range(index * width, (index + 1) * width)

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        own = self._labels(index)
        shift = own.start - self.classes(index).start
        splits = []
        for images, labels in (self.train, self.test):
            chosen = (labels >= own.start) & (labels < own.stop)
            splits.append(Split(self.ready(images[chosen]), labels[chosen] - shift))
        return Task(f"classes {own.start}-{own.stop - 1}", *splits)


_Maker = Callable[[str, ImageSet, ImageView, ScenarioOptions], Scenario]
FAMILIES: dict[str, tuple[str, _Maker]] = {
    "rotated": ("rotated a little further in each task", Rotated),
    "permuted": ("with the pixels in a new order in each task", Permuted),
    "split": ("a few classes per task", SplitClasses),
}

# The options that only one family uses.
_OF_ONE_FAMILY = {"step_degrees": "rotated", "classes_per_task": "split", "setting": "split"}

SCENARIOS: dict[str, str] = {
    f"{family}-{source}": f"{source}, {what}"
    for family, (what, _) in FAMILIES.items()
    for source in SOURCES
}


def build_scenario(
    name: str, options: ScenarioOptions, data: Path | None = None, *, download: bool = True
) -> Scenario:
    """The scenario with this name; a benchmark's images are found on disk or downloaded.

    Arguments:
        name: a family and a source, such as "rotated-mnist"; or a plug-in.
        options: number and kind of the tasks.
        data: folder to search for the source first.
        download: download the source if it is not on disk.
    """
    check_options(ScenarioOptions, vars(options), flag)
    if name not in SCENARIOS:
        return _plugin_scenario(name, options)
    family, source = name.split("-", 1)
    images = shared_source(source, data, download=download)
    return FAMILIES[family][1](name, images, VIEWS[source], options)


def scenario_settings(name: str, options: ScenarioOptions) -> dict[str, Any]:
    """The options that a benchmark uses, and its setting, as a trace notes them."""
    if name not in SCENARIOS:
        made = _plugin_scenario(name, options)
        return {"scenario": made.name, "tasks": made.n_tasks, **(made.recipe or {})}
    values = vars(options)
    unused = unused_by_scenario(name, values)
    used = {f.name: values[f.name] for f in fields(ScenarioOptions) if f.name not in unused}
    return {"setting": "domain"} | used


def unused_by_scenario(name: str, values: Mapping[str, Any]) -> set[str]:
    """The options that a scenario does not use, given the values of all."""
    if name not in SCENARIOS:
        taken = accepted(plugin("scenario", name, SCENARIOS))
        return {f.name for f in fields(ScenarioOptions)} - taken.keys()
    unused = {o for o, family in _OF_ONE_FAMILY.items() if not name.startswith(f"{family}-")}
    return unused if values.get("validation_per_class") else unused | {"validation_seed"}


def grows_with_tasks(name: str, setting: str) -> bool:
    """Whether each task of a benchmark adds outputs to the network; of a plug-in it may."""
    return name not in SCENARIOS or (name.startswith("split-") and setting != "domain")


def scenario_defaults(name: str) -> dict[str, Any]:
    """The options for which a plug-in's function has a default of its own."""
    if name in SCENARIOS:
        return {}
    known = {f.name for f in fields(ScenarioOptions)}
    taken = accepted(plugin("scenario", name, SCENARIOS))
    return {n: d for n, d in taken.items() if n in known and d not in (None, Parameter.empty)}


def _plugin_scenario(name: str, options: ScenarioOptions) -> Scenario:
    """The scenario of a plug-in, made once in a process."""
    return _plugin_tasks(name, select_options(ScenarioOptions, vars(options)))


@cache
def _plugin_tasks(name: str, options: ScenarioOptions) -> Scenario:
    maker = plugin("scenario", name, SCENARIOS)
    values = vars(options)
    found = make("scenario", name, maker, values)
    if not isinstance(found, Scenario):
        raise wrong_kind("scenario", name, found, "a Scenario or a function that returns one")
    found.check()
    taken = accepted(maker).keys() & values.keys() - {"tasks"}
    recipe = own_settings(found, import_path(maker) if is_in_file(name) else None)
    recipe |= {option: values[option] for option in sorted(taken)}
    named = copy(found)  # the user's object stays as it is
    for attribute, value in (("name", short_name(name)), ("recipe", recipe)):
        object.__setattr__(named, attribute, value)  # it may be a frozen dataclass
    return named


def first_of_each_class(labels: Tensor, n_classes: int, count: int) -> Tensor:
    """Indices of the first `count` samples of each class (all for 0), in file order."""
    if count == 0:
        return torch.arange(len(labels))
    fewest = int(torch.bincount(labels, minlength=n_classes).min())
    require(count <= fewest, "--train-per-class", count, f"at most {fewest} with this source")
    members = [torch.nonzero(labels == c).flatten()[:count] for c in range(n_classes)]
    return torch.cat(members).sort().values


def validation_split(
    images: Tensor, labels: Tensor, n_classes: int, options: ScenarioOptions
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images to train on, and as many validation images of each class, drawn by their seed."""
    count = options.validation_per_class
    fewest = int(torch.bincount(labels, minlength=n_classes).min())
    accepted = f"less than the {fewest} training images of a class"
    require(count < fewest, "--validation-per-class", count, accepted)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for c in range(n_classes):
        members = torch.nonzero(labels == c).flatten()
        generator = stream(options.validation_seed, "validation images", c)
        held[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return (images[~held], labels[~held]), (images[held], labels[held])


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(x / 255 − mean) / std per channel: uint8 (n, c, h, w) → float32."""
    shape = (-1, 1, 1)
    centre, scale = (torch.tensor(values).view(shape) for values in (mean, std))
    # In place: allocating memory takes longer than the arithmetic.
    return images.to(torch.float32, copy=True).div_(255).sub_(centre).div_(scale)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Images (n, c, h, w) rotated counter-clockwise about their centre, nearest neighbour.

    All images share one table of source pixels; pixels from outside are black.
    """
    height, width = images.shape[-2:]
    angle = math.radians(degrees % 360)
    cos, sin = math.cos(angle), math.sin(angle)
    y, x = torch.meshgrid(
        torch.arange(height, dtype=torch.float64) + 0.5 - height / 2,
        torch.arange(width, dtype=torch.float64) + 0.5 - width / 2,
        indexing="ij",
    )
    # y points down, so a counter-clockwise rotation looks up pixels clockwise. Rounding to 1e-9
    # puts right angles on the correct side of a pixel's edge.
    column = (cos * x - sin * y + width / 2).mul(1e9).round().div(1e9).floor().long()
    row = (sin * x + cos * y + height / 2).mul(1e9).round().div(1e9).floor().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    source = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).flatten()
    turned = images.flatten(-2)[..., source].view_as(images)
    return turned * inside.to(images.dtype)
