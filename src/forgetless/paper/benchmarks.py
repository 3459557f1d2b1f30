"""The paper's four benchmarks, at full scale and small on digits, and the runs on them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, final

from forgetless.data import ScenarioOptions
from forgetless.launch.runs import Config, resolve
from forgetless.methods import method_options
from forgetless.support.validation import require
from forgetless.trace import INCIDENTAL
from forgetless.training.models import ModelOptions
from forgetless.training.settings import Training

Protocol = Literal["released", "corrected", "frozen"]

TABLE1_METHODS = ("sgd", "ewc", "a-gem", "ogd", "pca-ogd")  # its columns, in its order
# Benchmark → its short name in tables and figures.
NAMES = {
    "permuted": "Permuted",
    "rotated": "Rotated",
    "split": "Split MNIST",
    "cifar": "Split CIFAR",
}


@final
@dataclass(frozen=True)
class Benchmark:
    """One of the paper's benchmarks.

    Arguments:
        title: its full name.
        scenario: its name for `forgetless run`.
        settings: where it differs from that scenario's preset.
        network: how the released code restricts training: the parameters that stay as
            initialised, and the step after which batch norm freezes.
        sizes: training images per class for which the change of the tangent kernel is measured;
            the last is the one that the experiments use.
        variance_samples: samples of the explained-variance table.
        storage: of methods whose directions are not stored as dense rows. Factored ones give the
            same results from a hundredth of the bytes.
    """

    title: str
    scenario: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    variance_samples: int = 3000
    storage: Mapping[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Scale:
    """The size of everything.

    Arguments:
        name: "full" is the paper's own; "small" runs on digits in minutes.
        seeds: in the format of the command line.
        benchmarks: by the keys that the printed numbers use.
        memory: directions or samples per task in Table 1.
        memories: directions or samples per task in the memory sweeps.
        overlap_samples: samples per task for the overlap matrix.
        variance_counts: components of the explained-variance table.
        few: components in the sentence about 14 components.
        strengths: of EWC, from which the corrected protocol chooses.
        search_seeds: seeds of that search.
        more_seeds: seeds where five do not decide.
        evaluate_every: epochs between evaluations within a task; the released code has 1,000 steps.
        validation: held-out images per class for that search.
        toy: samples per task and parameters of the worst-case toy.
        toy_mean: those of the toy whose samples have a mean.
    """

    name: str
    seeds: str
    benchmarks: Mapping[str, Benchmark]
    memory: int
    memories: tuple[int, ...]
    overlap_samples: int
    variance_counts: tuple[int, ...]
    few: int
    strengths: tuple[float, ...]
    search_seeds: str
    more_seeds: str
    evaluate_every: int
    validation: int
    toy: tuple[tuple[int, int], ...]
    toy_mean: tuple[int, int]

    def config(
        self, benchmark: str, method: str, protocol: Protocol = "released", **settings: Any
    ) -> Config:
        """A run of one of the benchmarks.

        Arguments:
            benchmark: its key.
            method: the method's name.
            protocol: "released" is the paper's code as it ran; "corrected" has the methods as
                they should be, on a network that trains as a whole; "frozen" has those methods on
                the network as the released code trains it.
            settings: further changes.
        """
        task_set = self.benchmarks[benchmark]
        chosen: dict[str, Any] = {"memory": self.memory, "seeds": self.seeds, **task_set.settings}
        if protocol == "released":
            chosen["protocol"] = "released"
        if method in task_set.storage:
            chosen["storage"] = task_set.storage[method]
        restricted = {} if protocol == "corrected" else task_set.network
        return resolve(task_set.scenario, method, **chosen | dict(restricted) | settings)

    def with_method(self, config: Config, method: str, **options: Any) -> Config:
        """The same configuration of a benchmark with another method."""
        found = next(b for b in self.benchmarks.values() if b.scenario == config.scenario)
        known = {n: value for n, value in found.settings.items() if n in method_options(method)}
        return config.with_method(method, **known | options)

    def tasks(self, benchmark: str) -> int:
        """The number of tasks of a benchmark."""
        return self.config(benchmark, "sgd").tasks


FULL = Scale(
    name="full",
    seeds="5",
    benchmarks={
        "permuted": Benchmark("Permuted MNIST", "permuted-mnist", sizes=(100, 200, 500, 1000)),
        "rotated": Benchmark("Rotated MNIST", "rotated-mnist", sizes=(100, 200, 500, 1000)),
        "split": Benchmark("Split MNIST", "split-mnist", variance_samples=1500),
        "cifar": Benchmark(
            "Split CIFAR",
            "split-cifar100",
            network={"freeze": "convolutions", "eval_mode_after": 1000},
            sizes=(100, 200, 500),
            variance_samples=1500,
            storage={"ogd": "factored"},
        ),
    },
    memory=100,
    memories=(25, 50, 100, 200),
    overlap_samples=250,
    variance_counts=(10, 25, 50, 100, 200, 500),
    few=14,
    strengths=(1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
    search_seeds="2",
    more_seeds="20",
    evaluate_every=13,
    validation=100,
    toy=((50, 100), (100, 1000), (150, 1000), (500, 200), (500, 215), (500, 500)),
    toy_mean=(500, 215),
)

_DIGITS = {"train_per_class": 40, "epochs": 2, "samples": 150, "tasks": 3, "hidden": 24}

SMALL = Scale(
    name="small",
    seeds="2",
    benchmarks={
        "permuted": Benchmark(
            "Permuted digits", "permuted-digits", _DIGITS, sizes=(20, 40), variance_samples=150
        ),
        "rotated": Benchmark(
            "Rotated digits",
            "rotated-digits",
            {**_DIGITS, "step_degrees": 25.0},
            sizes=(20, 40),
            variance_samples=150,
        ),
        "split": Benchmark("Split digits", "split-digits", {**_DIGITS, "samples": 80}),
        "cifar": Benchmark(
            "Split digits, LeNet",
            "split-digits",
            {**_DIGITS, "samples": 80, "model": "lenet", "lr": 0.02},
            network={"freeze": "convolutions", "eval_mode_after": 8},
            sizes=(20, 40),
            variance_samples=80,
        ),
    },
    memory=8,
    memories=(4, 8, 16),
    overlap_samples=30,
    variance_counts=(2, 5, 10, 20, 40, 80),
    few=3,
    strengths=(10.0, 100.0),
    search_seeds="1",
    more_seeds="3",
    evaluate_every=1,
    validation=10,
    toy=((40, 80), (40, 200)),
    toy_mean=(40, 80),
)

SCALES = {scale.name: scale for scale in (FULL, SMALL)}


def scale_named(name: str) -> Scale:
    """The scale of that name."""
    require(name in SCALES, "--scale", name, " or ".join(SCALES), SCALES)
    return SCALES[name]


# Options of the paper's methods that came later, with the value that every earlier run has.
_NEW_OPTIONS = {"decay": 1.0}
# The cost of a step of other methods, in steps of plain SGD.
_COSTS = {"ewc": 1.2, "joint": 2.0, "a-gem": 4.5, "factored": 5.0, "gem-nt": 20.0, "gem": 60.0}
_INPUTS = {"mlp": 1024, "lenet": 3200}  # of the largest layer
_BYTES_IN_A_STEP = 2.4e8  # that a GPU reads while it does a step of plain SGD
# Settings that are part of every key. Younger ones are, too, unless they have their defaults, which
# do not change the results of runs that were stored before.
_OLD_SETTINGS = {
    "batch_size", "budget", "classes_per_task", "dtype", "epochs", "eval_mode_after", "freeze",
    "hidden", "lr", "model", "step_degrees", "storage", "tasks", "train_per_class",
    "validation_per_class",
}  # fmt: skip


@final
@dataclass(frozen=True)
class Run:
    """One scenario learned by one method with all its seeds.

    Arguments:
        config: the settings.
        weights: whether to store the weights after each task.
    """

    config: Config
    weights: bool = False

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that decide the result, and only those."""
        config = self.config
        # Without heads there is nothing that could go through them.
        if not config.scenario.startswith("split") and "agem_heads" in config.options:
            config = config.with_options(agem_heads="own")
        method = config.build_method()
        if not method.keeps_directions:
            config = replace(config, storage="dense")
        groups = (ScenarioOptions, ModelOptions, Training)
        names = {f.name for group in groups for f in fields(group)} - INCIDENTAL
        changed = {n for n in names if getattr(config, n) != getattr(Config, n)}
        # The choice of validation images, which was another one before it had a seed.
        chosen = {"validation_seed"} if config.validation_per_class else set()
        names &= _OLD_SETTINGS | changed | chosen
        values = asdict(config)
        options = {name: value for name, value in vars(method).items() if value is not None}
        options = {n: v for n, v in options.items() if (n, v) not in _NEW_OPTIONS.items()}
        return {
            "scenario": config.scenario,
            "method": {"name": config.method} | options,
            "seeds": list(config.seed_list()),
        } | {name: values[name] for name in sorted(names)}

    @cached_property
    def key(self) -> str:
        """The name of the run's folder: scenario, method and a hash of all settings."""
        text = json.dumps(self.settings, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{self.config.scenario}-{self.config.method}-{digest}"

    @property
    def samples(self) -> int:
        """Training samples of a task; without a limit, as many as CIFAR-100 has."""
        c = self.config
        classes = c.classes_per_task if c.scenario.startswith("split") else 10
        return (c.train_per_class or 500) * classes

    @property
    def effort(self) -> float:
        """A rough estimate of the cost in steps of plain SGD, for the time left."""
        c = self.config
        steps = c.tasks * c.epochs * max(1, self.samples // c.batch_size)
        return steps * _cost_of_a_step(c)


def _cost_of_a_step(config: Config) -> float:
    """The cost of a method's step in steps of plain SGD, as measured on the paper's benchmarks.

    A projection takes the time to read the rows, on average half of those at the end.
    """
    network = 1.0 if config.model == "mlp" else 3.0
    if config.method not in ("ogd", "pca-ogd"):
        return network * _COSTS.get(config.method, 1.0)
    if config.storage == "factored":
        return network * _COSTS["factored"]
    number = 2 if config.storage == "bfloat16" else 4
    row = config.hidden * _INPUTS.get(config.model, 1000) * number
    rows = len(config.seed_list()) * config.tasks * float(config.options["memory"]) / 2
    return network + rows * row / _BYTES_IN_A_STEP
