"""A run that artefacts need: its settings, what tells it from others, and how much work it is."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, final

from forgetless.data import ScenarioOptions
from forgetless.launch.config import Config
from forgetless.training.models import ModelOptions
from forgetless.training.settings import Training

# What a step of other methods takes, in steps of plain SGD.
_EFFORTS = {"ewc": 1.2, "joint": 2.0, "a-gem": 4.5, "factored": 5.0, "gem-nt": 20.0, "gem": 60.0}
_INPUTS = {"mlp": 1024, "lenet": 3200}  # of the largest layer
_BYTES_IN_A_STEP = 2.4e8  # that a GPU reads while it does a step of plain SGD
# How a run is carried out, which does not change what comes out.
_INCIDENTAL = {"seeds_together", "evaluate"}


@final
@dataclass(frozen=True)
class Run:
    """One scenario learned by one method with all its seeds.

    Arguments:
        config: the settings.
        weights: whether the weights after each task are wanted.
    """

    config: Config
    weights: bool = False

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, and nothing else."""
        config = self.config
        family = config.scenario.split("-")[0]
        # Without heads there is nothing that could go through them.
        if family != "split" and "agem_heads" in config.options:
            config = config.with_options(agem_heads="own")
        method = config.build_method()
        if not method.keeps_directions:
            config = replace(config, storage="dense")
        groups = (ScenarioOptions, ModelOptions, Training)
        names = {f.name for group in groups for f in fields(group)} - _INCIDENTAL
        values = asdict(config)
        of: Any = method
        options = {name: value for name, value in asdict(of).items() if value is not None}
        if not config.unprotected:  # which came after many runs, and changes none of them
            names.remove("unprotected")
        return {
            "scenario": config.scenario,
            "method": {"name": config.method} | options,
            "seeds": list(config.seed_list()),
        } | {name: values[name] for name in sorted(names)}

    @cached_property
    def key(self) -> str:
        """What tells runs apart: their scenario, method and a hash of all settings."""
        text = json.dumps(self.settings, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{self.config.scenario}-{self.config.method}-{digest}"

    @property
    def samples(self) -> int:
        """Training samples of a task; where their number is not limited, as CIFAR-100 has them."""
        c = self.config
        classes = c.classes_per_task if c.scenario.startswith("split") else 10
        return (c.train_per_class or 500) * classes

    @property
    def effort(self) -> float:
        """Roughly how much work it is, in steps of plain SGD, for an estimate of the time left."""
        c = self.config
        steps = c.tasks * c.epochs * max(1, self.samples // c.batch_size)
        return steps * _effort_of_a_step(c)


def _effort_of_a_step(config: Config) -> float:
    """What a method's step takes, in steps of plain SGD, as seen on the paper's benchmarks.

    A projection takes as long as it takes to read the rows, on average half of those at the end.
    """
    network = 1.0 if config.model == "mlp" else 3.0
    if config.method not in ("ogd", "pca-ogd"):
        return network * _EFFORTS.get(config.method, 1.0)
    if config.storage == "factored":
        return network * _EFFORTS["factored"]
    row = (
        config.hidden * _INPUTS.get(config.model, 1000) * (2 if config.storage == "bfloat16" else 4)
    )
    rows = len(config.seed_list()) * config.tasks * float(config.options["memory"]) / 2
    return network + rows * row / _BYTES_IN_A_STEP
