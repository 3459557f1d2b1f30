"""The configuration of a run: every setting, its default, and the presets of the benchmarks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatch
from typing import Any, final

from forgetless.data import SCENARIOS, ScenarioOptions, unused_by_scenario
from forgetless.methods import METHODS, MethodOptions, unused_by_method
from forgetless.support.errors import ConfigError, require
from forgetless.support.options import check_numbers, flag, option
from forgetless.training.models import ModelOptions
from forgetless.training.settings import Training

_MOST_SEEDS = 1000
PROTOCOLS = ("corrected", "released")


@final
@dataclass(frozen=True, kw_only=True)
class Config(MethodOptions, Training, ModelOptions, ScenarioOptions):
    """Everything that decides the result of a run."""

    scenario: str
    method: str
    seeds: str = option("1", "How many seeds (5 means 0 to 4), or which ones (3,7).")
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto takes a GPU if there is one.")
    protocol: str = option(
        "corrected",
        "The methods as they should be, or with all departures of the paper's released code.",
        choices=PROTOCOLS,
    )

    def seed_list(self) -> tuple[int, ...]:
        """The seeds as numbers."""
        text = str(self.seeds).strip()
        accepted = f"a count up to {_MOST_SEEDS} such as 5, or distinct seeds such as 3,7"
        parts = [part.strip() for part in text.split(",") if part.strip()]
        numeric = bool(parts) and all(part.isascii() and part.isdigit() for part in parts)
        require(numeric, "--seeds", text, accepted)
        require(all(len(part) < 10 for part in parts), "--seeds", text, accepted)
        require("," in text or int(text) <= _MOST_SEEDS, "--seeds", text, accepted)
        seeds = tuple(map(int, parts)) if "," in text else tuple(range(int(text)))
        valid = bool(seeds) and len(set(seeds)) == len(seeds)
        require(valid, "--seeds", text, accepted)
        return seeds

    def as_dict(self) -> dict[str, Any]:
        """All settings, for a trace."""
        return asdict(self)


# What differs from the defaults, for the scenarios that a pattern fits; later ones win.
# MNIST and CIFAR-100: the settings of the paper's experiments.
PRESETS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("*-mnist", {"train_per_class": 1000}),
    ("rotated-*mnist", {"tasks": 15}),
    ("permuted-*mnist", {"tasks": 15}),
    ("split-*mnist", {"epochs": 5}),
    (
        "*-cifar100",
        {"model": "lenet", "hidden": 200, "epochs": 50, "samples": 2500, "ewc_strength": 25.0},
    ),
    ("split-cifar100", {"tasks": 20, "classes_per_task": 5}),
    ("*-digits", {"lr": 0.05, "samples": 1000, "ewc_strength": 50.0}),
    ("rotated-digits", {"step_degrees": 15.0}),
)

RELEASED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("*", {"centred": True, "ewc_fisher": "released", "agem_heads": "released"}),
    ("split-cifar100", {"freeze": "convolutions", "eval_mode_after": 1000}),
)


def resolve(scenario: str, method: str, **given: Any) -> Config:
    """The configuration of a run: defaults, then the scenario's preset, then what was given.

    Arguments:
        scenario, method: names; `forgetless list` shows them.
        given: settings by name; None means not given.
    """
    if scenario not in SCENARIOS:
        raise ConfigError(f"unknown scenario {scenario!r}; there are {', '.join(SCENARIOS)}")
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}; there are {', '.join(METHODS)}")
    known = {f.name: f for f in fields(Config)}
    given = _with_budget(given)
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}; there are {', '.join(known)}")
        choices = known[name].metadata.get("choices", ())
        if choices:
            require(value in choices, flag(name), value, " or ".join(choices))
    check_numbers(Config, given, flag)
    tables = [PRESETS] + ([RELEASED] if given.get("protocol") == "released" else [])
    settings: dict[str, Any] = {}
    for table in tables:
        for pattern, preset in table:
            if fnmatch(scenario, pattern):
                settings |= preset
    return replace(Config(scenario=scenario, method=method), **settings | given)


def unused_settings(settings: Mapping[str, Any]) -> set[str]:
    """Those that the method and the scenario of a run have no use for.

    Arguments:
        settings: all of them. A run that a script made does not name both, and may use any.
    """
    method, scenario = settings.get("method"), settings.get("scenario")
    unused: set[str] = set()
    if isinstance(method, str) and method in METHODS:
        unused |= unused_by_method(method, by_variance=settings.get("variance") is not None)
    if isinstance(scenario, str) and scenario in SCENARIOS:
        unused |= unused_by_scenario(scenario)
    return unused


def refuse_unused(configs: Sequence[Config], given: Mapping[str, Any]) -> None:
    """Refuse a setting that was given and that none of the runs has a use for.

    Arguments:
        configs: of runs on one scenario, made from what was given.
        given: settings by name, as for `resolve`.
    """
    scenario, methods = configs[0].scenario, [config.method for config in configs]
    idle = set.intersection(*(unused_settings(config.as_dict()) for config in configs))
    for name, value in _with_budget(dict(given)).items():
        if value is None or name not in idle:
            continue
        written = flag(name) if name in given else f"--memory {value}"  # a size of all
        if name in unused_by_scenario(scenario):
            raise ConfigError(f"{scenario} has no use for {written}")
        if name == "memory" and "variance" in given and "variance" not in idle:
            written += " beside --variance"
        verb = "has" if len(methods) == 1 else "have"
        raise ConfigError(f"{', '.join(methods)} {verb} no use for {written}")


def _with_budget(given: dict[str, Any]) -> dict[str, Any]:
    """Where `memory` is a size or "auto", that is the budget, and the count is left as it is."""
    memory = given.get("memory")
    if not isinstance(memory, str):
        return given
    text = memory.strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return given | {"memory": int(text)}
    accepted = "how many are kept of each task, a size such as 4GB, or auto"
    require(text[-1:].isalpha(), "--memory", memory, accepted)
    return given | {"memory": None, "budget": text}


def describe_default(name: str) -> str:
    """The default of a setting and the scenarios that have another one, for people."""
    default = next(f.default for f in fields(Config) if f.name == name)
    others = [f"{_shown(preset[name])} for {p}" for p, preset in PRESETS if name in preset]
    protocol = [
        f"{_shown(preset[name])} with --protocol released" + ("" if p == "*" else f" for {p}")
        for p, preset in RELEASED
        if name in preset
    ]
    return ", ".join([_shown(default), *others, *protocol])


def _shown(value: Any) -> str:
    shown = {"": "none", "None": "none", "True": "yes", "False": "no"}
    return shown.get(str(value), f"{value:g}" if isinstance(value, float) else str(value))
