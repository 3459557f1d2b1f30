"""The paper's four benchmarks at full scale, and small ones on digits with the same structure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

from forgetless.launch.config import Config, resolve
from forgetless.methods import method_options
from forgetless.support.errors import require

Protocol = Literal["released", "corrected", "frozen"]

METHODS = ("sgd", "ewc", "a-gem", "ogd", "pca-ogd")  # the columns of Table 1, in its order


@final
@dataclass(frozen=True)
class Benchmark:
    """One of the paper's benchmarks.

    Arguments:
        title: for people.
        scenario: its name for `forgetless run`.
        settings: what differs from that scenario's preset.
        network: how the released code restricts training of the network: which parameters stay
            as they were initialised, and when batch norm freezes.
        sizes: training images of a class for which the change of the tangent kernel is measured;
            the last is what the experiments use.
        variance_samples: samples of the explained-variance table.
        storage: of methods whose directions are not kept as dense rows. Factored ones give the
            same results, from a hundredth of the bytes.
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
    """How large everything is.

    Arguments:
        name: "full" is the paper's own; "small" runs on digits in minutes.
        seeds: as the command line takes them.
        benchmarks: by the keys that the printed numbers use.
        memory: directions or samples of each task in Table 1.
        memories: those of the memory sweeps.
        overlap_samples: samples of a task that the overlap matrix is computed on.
        variance_counts: components of the explained-variance table.
        few: components of the sentence about 14 components.
        strengths: of EWC, from which the corrected protocol chooses.
        search_seeds: seeds of that search.
        validation: images of a class that it measures on.
        toy: samples of a task and parameters of the worst-case toy.
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
    validation: int
    toy: tuple[tuple[int, int], ...]

    def config(
        self, benchmark: str, method: str, protocol: Protocol = "released", **settings: Any
    ) -> Config:
        """A run of one of the benchmarks.

        Arguments:
            benchmark: its key.
            method: the method's name.
            protocol: "released" is the paper's code as it ran; "corrected" the methods as they
                should be, on a network that trains as a whole; "frozen" those methods on the
                network as the released code trains it.
            settings: what else differs.
        """
        of = self.benchmarks[benchmark]
        chosen: dict[str, Any] = {"memory": self.memory, "seeds": self.seeds, **of.settings}
        if protocol == "released":
            chosen["protocol"] = "released"
        if method in of.storage:
            chosen["storage"] = of.storage[method]
        restricted = {} if protocol == "corrected" else of.network
        return resolve(of.scenario, method, **chosen | dict(restricted) | settings)

    def with_method(self, config: Config, method: str, **options: Any) -> Config:
        """The run of a benchmark with another method, all else as it is in the configuration."""
        of = next(b for b in self.benchmarks.values() if b.scenario == config.scenario)
        known = {
            name: value for name, value in of.settings.items() if name in method_options(method)
        }
        return config.with_method(method, **known | options)

    def tasks(self, benchmark: str) -> int:
        """How many tasks a benchmark has."""
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
    validation=100,
    toy=((50, 100), (100, 1000), (150, 1000), (500, 200), (500, 215), (500, 500)),
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
    validation=10,
    toy=((40, 80), (40, 200)),
)

SCALES = {scale.name: scale for scale in (FULL, SMALL)}


def scale_named(name: str) -> Scale:
    """The scale of that name."""
    require(name in SCALES, "--scale", name, " or ".join(SCALES))
    return SCALES[name]
