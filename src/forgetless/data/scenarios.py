"""Tasks and scenarios: classification problems in sequence, of tensors or of image sources."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cache
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from forgetless.data.datasets import SOURCES, ImageSet, shared_source
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
    SHARE_OR_ZERO,
    ConfigError,
    DataError,
    check_options,
    first_line,
    flag,
    option,
    require,
    select_options,
    whole,
)

Setting = Literal["task", "domain", "class"]
SETTINGS: tuple[Setting, ...] = ("task", "domain", "class")


@final
@dataclass(frozen=True)
class Split:
    """The training or test samples of one task, shared by all seeds.

    Arguments:
        inputs: (n, *shape), ready for the network.
        labels: (n,), each an index among the outputs of the whole scenario.
        orders: (S, d), for each seed the order of the d numbers of an input, or None. Permuting
            the samples taken costs less than S permuted copies of the data.
        origins: (n,), if samples have one of several orders (S, K, d), which.
    """

    inputs: Tensor
    labels: Tensor
    orders: Tensor | None = None
    origins: Tensor | None = None

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.labels)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (S, m, *shape) and labels (S, m) at index (S, m)."""
        inputs = self.inputs[index]
        if self.orders is not None:
            flat, orders = inputs.flatten(2), self.orders.unsqueeze(1)
            if self.origins is not None:
                seed = torch.arange(len(index), device=index.device).unsqueeze(1)
                orders = self.orders[seed, self.origins[index]]
            inputs = flat.gather(2, orders.expand_as(flat)).view_as(inputs)
        return inputs, self.labels[index]

    def subset(self, index: Tensor) -> "Split":
        """The samples at index (m,)."""
        origins = None if self.origins is None else self.origins[index]
        return Split(self.inputs[index], self.labels[index], self.orders, origins)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Split":
        """The same samples on another device."""
        inputs, labels = self.inputs.to(device, dtype), self.labels.to(device)
        orders = None if self.orders is None else self.orders.to(device)
        origins = None if self.origins is None else self.origins.to(device)
        return Split(inputs, labels, orders, origins)

    @staticmethod
    def joined(parts: Sequence["Split"]) -> "Split":
        """The samples of several splits, none of which is joined already."""
        inputs, labels = (torch.cat([getattr(p, n) for p in parts]) for n in ("inputs", "labels"))
        known = [part.orders for part in parts if part.orders is not None]
        if not known:
            return Split(inputs, labels)
        same = torch.arange(known[0].shape[1]).expand_as(known[0])
        orders = [same if part.orders is None else part.orders for part in parts]
        counts = torch.tensor([len(part) for part in parts])
        origins = torch.arange(len(parts)).repeat_interleave(counts)
        return Split(inputs, labels, torch.stack(orders, 1), origins)


@final
@dataclass(frozen=True)
class Task:
    """One problem of a sequence.

    Arguments:
        name: for tables and messages.
        train: the samples to learn from.
        test: the samples that accuracy is measured on.
    """

    name: str
    train: Split
    test: Split


class Scenario(ABC):
    """A sequence of tasks; the data of a task is created on request.

    The setting decides which outputs compete for a sample, in the loss and in the accuracy:

    - "task" (task-incremental): those of the sample's own task, which is known at test time.
    - "domain" (domain-incremental): all of them; every task has the same classes.
    - "class" (class-incremental): those of all classes seen so far, as if the head grew with
      them; with `full_head` all outputs, from the first task on. In training the cross-entropy is
      over these, for new and for stored samples.

    Attributes:
        name: for tables and the command line.
        setting: "task", "domain" or "class".
        n_tasks: the length of the sequence.
        input_shape: shape of one input.
        n_outputs: number of outputs that a network needs for all tasks.
        full_head: whether all outputs compete from the start, in the setting "class".
        measured_on: whether the tasks' test sets are the "test" set or a "validation" set, held
            out of the training set.
        recipe: the options from which its name makes it again, as a trace notes them; None for
            tasks that only a script can make.
    """

    name: str
    setting: Setting
    n_tasks: int
    input_shape: tuple[int, ...]
    n_outputs: int
    full_head: bool = False
    measured_on: Literal["test", "validation"] = "test"
    recipe: Mapping[str, Any] | None = None

    @abstractmethod
    def task(self, index: int, seeds: Sequence[int]) -> Task:
        """Task `index`, counted from 0, with the orders of these seeds."""

    @abstractmethod
    def classes(self, index: int) -> range:
        """The outputs of the classes of task `index`."""

    def competing(self, index: int, learned: int | None = None) -> range:
        """The outputs that compete for a sample of task `index`.

        Arguments:
            index: the sample's task.
            learned: the latest task that was learned; by default `index` itself.
        """
        if self.setting == "task":
            return self.classes(index)
        if self.setting == "domain" or self.full_head:
            return range(self.n_outputs)
        latest = index if learned is None else max(index, learned)
        return range(max(self.classes(t).stop for t in range(latest + 1)))

    @property
    def has_heads(self) -> bool:
        """Whether tasks have their own outputs, so that a sample's task must be known."""
        own = any(len(self.classes(t)) < self.n_outputs for t in range(self.n_tasks))
        return self.setting == "task" and own

    def check(self) -> None:
        """Reject a scenario without a setting, or whose classes contradict it."""
        setting = getattr(self, "setting", None)
        accepted = "task, domain or class: which outputs compete for a sample"
        require(setting in SETTINGS, f"the setting of {self.name}", setting, accepted)
        known = not self.full_head or setting == "class"
        require(known, "full_head", self.full_head, "False in another setting than class")
        seen = 0
        for t in range(self.n_tasks):
            own, whose = self.classes(t), f"the classes of task {t + 1}"
            inside = own.step == 1 and 0 <= own.start < own.stop <= self.n_outputs
            require(inside, whose, own, f"a range within the {self.n_outputs} outputs")
            if setting == "domain":
                require(own == range(self.n_outputs), whose, own, "all outputs in a domain setting")
            elif setting == "class":
                accepted = f"a range from at most {seen} in a class setting, without a gap"
                require(own.start <= seen, whose, own, accepted)
            seen = max(seen, own.stop)

    def checked_task(self, index: int, seeds: Sequence[int]) -> Task:
        """Task `index`, if it has samples of classes that compete in it."""
        where = f"task {index + 1} of {self.name}"
        try:
            task = self.task(index, seeds)
        except StopIteration as end:
            raise DataError(
                f"{where} does not exist: its stream has ended, and n_tasks is {self.n_tasks}"
            ) from end
        known = self.competing(index)
        for split, what in ((task.train, "training"), (task.test, "test")):
            if not len(split):
                raise DataError(f"{where} has no {what} samples")
            least, most = (int(end) for end in split.labels.aminmax())
            if least < known.start or most >= known.stop:
                label = least if least < known.start else most
                raise DataError(
                    f"{where} has {what} samples of class {label}, and the outputs that compete in "
                    f"it are {known.start} to {known.stop - 1}: its classes() must have all of them"
                )
        return task


def own_settings(scenario: Scenario, path: str | None) -> dict[str, Any]:
    """What a trace notes of tasks that are not a benchmark's.

    Arguments:
        path: where they are defined; None for an installed plug-in, whose name says it.
    """
    found: dict[str, Any] = {"setting": scenario.setting}
    if path is not None:
        found["scenario_from"] = path
    if scenario.measured_on != "test":
        found["measured_on"] = scenario.measured_on
    if scenario.full_head:
        found["full_head"] = True
    return found


Pair = tuple[Tensor, Tensor]
TaskSource = Pair | Dataset[Any]


@final
class TensorScenario(Scenario):
    """Any list of (train, test) pairs, each a pair of tensors or a map-style dataset.

    Arguments:
        tasks: for each task its training and its test samples, (inputs, labels) each.
        setting: which outputs compete (see `Scenario`). With "domain" all tasks have the same
            labels; with "class" every class has its own label, and each task continues where the
            earlier ones stop; with "task" labels count from 0 within each task, which has its own
            outputs.
        full_head: with "class", let all outputs compete from the start.
        name: for tables and messages.

    Example:
        >>> x, y = torch.randn(20, 5), torch.arange(20) % 2
        >>> tasks = TensorScenario([((x, y), (x, y)), ((-x, y), (-x, y))])
        >>> tasks.n_tasks, tasks.n_outputs
        (2, 2)
    """

    def __init__(
        self,
        tasks: Sequence[tuple[TaskSource, TaskSource]],
        *,
        setting: Setting = "domain",
        full_head: bool = False,
        name: str = "custom",
    ) -> None:
        require(setting in SETTINGS, "setting", setting, "task, domain or class", SETTINGS)
        self.full_head = full_head
        tasks = list(tasks)
        if not tasks:
            raise DataError("a scenario needs at least one task")
        pairs = [
            (_tensors(train, f"training set of task {t}"), _tensors(test, f"test set of task {t}"))
            for t, (train, test) in enumerate(tasks, 1)
        ]
        self.name = name
        self.setting = setting
        self.n_tasks = len(pairs)
        self.input_shape = tuple(pairs[0][0][0].shape[1:])
        for t, pair in enumerate(pairs, 1):
            for inputs, _ in pair:
                if tuple(inputs.shape[1:]) != self.input_shape:
                    raise DataError(
                        f"inputs of task {t} have shape {tuple(inputs.shape[1:])}, "
                        f"those of task 1 {self.input_shape}"
                    )
        labels = [{int(c) for _, y in pair for c in y.unique()} for pair in pairs]
        _check_labels(labels, setting)
        stops = [max(own) + 1 for own in labels]
        if setting == "task":
            starts = [sum(stops[:t]) for t in range(len(stops))]
            self._classes = [range(a, a + n) for a, n in zip(starts, stops, strict=True)]
        elif setting == "domain":
            self._classes = [range(max(stops))] * len(stops)
        else:
            self._classes = [range(min(own), stop) for own, stop in zip(labels, stops, strict=True)]
        self.n_outputs = max(c.stop for c in self._classes)
        self._splits = [
            tuple(Split(x, y + (c.start if setting == "task" else 0)) for x, y in pair)
            for pair, c in zip(pairs, self._classes, strict=True)
        ]

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        """Task `index`, the same for every seed."""
        return Task(f"task {index + 1}", *self._splits[index])

    def classes(self, index: int) -> range:
        """The outputs of the classes of task `index`."""
        return self._classes[index]


def _check_labels(labels: Sequence[set[int]], setting: Setting) -> None:
    """Reject labels that belong to another setting."""
    seen: set[int] = set()
    for t, own in enumerate(labels, 1):
        if setting == "task" and min(own) > 0:
            raise ConfigError(
                f"the labels of task {t} start at {min(own)}: with setting='task' they count from "
                "0 within each task"
            )
        if setting == "domain" and not own & labels[0]:
            raise ConfigError(
                f"task {t} has none of the labels of task 1, and with setting='domain' all tasks "
                "have the same: choose setting='task' (labels from 0 within each task) or 'class'"
            )
        if setting == "class" and (own <= seen or max(own) + 1 != len(seen | own)):
            raise ConfigError(
                f"with setting='class' every class has its own label, and task {t} must add the "
                f"labels {len(seen)}, {len(seen) + 1}, …, not {', '.join(map(str, sorted(own)))}"
            )
        seen |= own


def _tensors(source: TaskSource, what: str) -> Pair:
    """Inputs and labels as two checked tensors."""
    try:
        if isinstance(source, Dataset):
            samples = [source[i] for i in range(len(source))]  # type: ignore[arg-type]
            if not samples:
                raise DataError(f"the {what} is empty")
            source = (
                torch.stack([torch.as_tensor(x) for x, _ in samples]),
                torch.stack([torch.as_tensor(y) for _, y in samples]),
            )
        inputs, labels = (torch.as_tensor(part) for part in source)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, DataError):
            raise
        reason = first_line(error)
        raise DataError(
            f"the {what} must be a pair of tensors, or a map-style dataset of input tensors and "
            f"labels: {reason}"
        ) from error
    if len(inputs) == 0:
        raise DataError(f"the {what} is empty")
    if not inputs.is_floating_point():
        raise DataError(f"the {what} must have floating-point inputs, not {inputs.dtype}")
    if not bool(inputs.isfinite().all()):
        raise DataError(f"the {what} has inputs that are NaN or infinite")
    if labels.shape != inputs.shape[:1] or labels.is_floating_point() or labels.is_complex():
        raise DataError(
            f"the {what} needs one integer label per input, ({len(inputs)},), "
            f"not {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if int(labels.min()) < 0:
        raise DataError(f"the {what} has a negative label, {int(labels.min())}")
    return inputs, labels.long()


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
    full_head: bool = option(
        False,
        "Setting class: let all outputs compete from the start, not those of classes seen so far.",
    )
    blurry: float = option(
        0.0,
        "Share of each task's training samples that are dealt to the other tasks, which blurs the "
        "boundaries.",
        accepted=SHARE_OR_ZERO,
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


# MNIST and CIFAR-100 as in the paper's code, CIFAR-10 by its training images.
VIEWS: dict[str, ImageView] = {
    "digits": ImageView(0, (0.305,), (0.376,)),
    "mnist": ImageView(2, (0.1,), (0.2752,)),
    "fashion-mnist": ImageView(2, (0.219,), (0.331,)),
    "cifar10": ImageView(0, (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
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
        self.full_head = self.recipe.get("full_head", False)
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


@final
class Blurry(Scenario):
    """Tasks with blurred boundaries: each has a few samples of all the others.

    The share M of each task's training samples, a random choice, is dealt evenly to the other
    tasks: with tasks of disjoint classes, the blurry-M setup of Bang et al. (2021, "Rainbow
    memory"). Test sets stay as they are. In the setting "class" every class comes by from the first
    task on, so all outputs compete from there on.

    Arguments:
        tasks: in the setting "domain" or "class".
        share: M, in [0, 1).
        seed: of the choice, which is the same for all seeds of a run.
    """

    def __init__(self, tasks: Scenario, share: float, *, seed: int = 0) -> None:
        SHARE_OR_ZERO.check("share", share)
        whole(0).check("seed", seed)
        blurs = tasks.setting in ("domain", "class")
        require(blurs, "the setting of blurry tasks", tasks.setting, "domain or class")
        require(tasks.n_tasks > 1, "the number of blurry tasks", tasks.n_tasks, "at least 2")
        self.tasks, self.share, self.seed = tasks, share, seed
        self.name, self.setting, self.n_tasks = tasks.name, tasks.setting, tasks.n_tasks
        self.input_shape, self.n_outputs = tasks.input_shape, tasks.n_outputs
        self.full_head, self.measured_on = tasks.setting == "class", tasks.measured_on
        self.recipe = None if tasks.recipe is None else {**tasks.recipe, "blurry": share}

    def classes(self, index: int) -> range:
        """The outputs of the classes that task `index` has most samples of, and is tested on."""
        return self.tasks.classes(index)

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        """Task `index`: what it keeps, and what the others give, in a random order."""
        own, parts = self.tasks.task(index, seeds), []
        for t in range(self.n_tasks):
            train = own.train if t == index else self.tasks.task(t, seeds).train
            order = torch.randperm(len(train), generator=stream(self.seed, "blurry", t))
            given = round(self.share * len(order))
            # The first part is for the first of the other tasks, and so on.
            others = order[:given].tensor_split(self.n_tasks - 1)
            mine = order[given:] if t == index else others[index - (index > t)]
            parts.append(train.subset(mine))
        mixed = Split.joined(parts)
        order = torch.randperm(len(mixed), generator=stream(self.seed, "blurry order", index))
        return Task(own.name, mixed.subset(order), own.test)


_Maker = Callable[[str, ImageSet, ImageView, ScenarioOptions], Scenario]
FAMILIES: dict[str, tuple[str, _Maker]] = {
    "rotated": ("rotated a little further in each task", Rotated),
    "permuted": ("with the pixels in a new order in each task", Permuted),
    "split": ("a few classes per task", SplitClasses),
}

# The options that only one family uses.
_OF_ONE_FAMILY = {
    "step_degrees": "rotated",
    "classes_per_task": "split",
    "setting": "split",
    "full_head": "split",
}

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
    made = FAMILIES[family][1](name, images, VIEWS[source], options)
    return Blurry(made, options.blurry) if options.blurry else made


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
        taken = set(accepted(plugin("scenario", name, SCENARIOS)))
        taken |= {"blurry"} if values.get("blurry") else set()
        return {f.name for f in fields(ScenarioOptions)} - taken
    unused = {o for o, family in _OF_ONE_FAMILY.items() if not name.startswith(f"{family}-")}
    unused |= set() if values.get("setting") == "class" else {"full_head"}
    unused |= set() if values.get("blurry") else {"blurry"}
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
    made = _plugin_tasks(name, select_options(ScenarioOptions, vars(options)))
    takes = "blurry" in accepted(plugin("scenario", name, SCENARIOS))
    return Blurry(made, options.blurry) if options.blurry and not takes else made


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
