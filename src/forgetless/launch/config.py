"""The configuration of a run: every setting, its default, and the presets of the benchmarks."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from fnmatch import fnmatch
from typing import Any, final

from forgetless.data import SCENARIOS, ScenarioOptions, unused_by_scenario
from forgetless.methods import METHODS, Method, build_method, method_class, method_options
from forgetless.support.errors import ConfigError, require
from forgetless.support.options import check_option, flag, option
from forgetless.training.models import ModelOptions
from forgetless.training.settings import Training

_MOST_SEEDS = 1000
PROTOCOLS = ("corrected", "released")


@final
@dataclass(frozen=True, kw_only=True)
class Config(Training, ModelOptions, ScenarioOptions):
    """Everything that decides the result of a run.

    Attributes:
        options: the method's own settings by name, as `method_options` lists them.
    """

    scenario: str
    method: str
    seeds: str = option("1", "How many seeds (5 means 0 to 4), or which ones (3,7).")
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto takes a GPU if there is one.")
    protocol: str = option(
        "corrected",
        "The methods as they should be, or with all departures of the paper's released code.",
        choices=PROTOCOLS,
    )
    options: Mapping[str, Any] = field(default_factory=dict)

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

    def build_method(self) -> Method[Any]:
        """The method with its options."""
        return build_method(self.method, self.options)

    def as_dict(self) -> dict[str, Any]:
        """All settings in one flat dictionary, as a trace stores them."""
        settings = asdict(self)
        settings |= settings.pop("options")
        return settings

    def with_options(self, **options: Any) -> "Config":
        """The same configuration with other settings of the method."""
        return replace(self, options={**self.options, **options})

    def with_method(self, method: str, **options: Any) -> "Config":
        """The same configuration of everything but the method, for another one with its options."""
        other = {"scenario", "method", "options"}
        common = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in other}
        return resolve(self.scenario, method, **common | options)


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


def setting_fields() -> dict[str, dict[str, Field[Any]]]:
    """Setting → the fields that it sets, by the name of the method; "" for those of all runs."""
    found = {f.name: {"": f} for f in fields(Config) if f.name != "options"}
    for name in METHODS:
        for setting, of in method_options(name).items():
            found.setdefault(setting, {})[name] = of
    return found


def resolve(scenario: str, method: str, **given: Any) -> Config:
    """The configuration of a run: defaults, then the scenario's preset, then what was given.

    Arguments:
        scenario, method: names; `forgetless list` shows them.
        given: settings by name; None means not given. Those of other methods are checked only.
    """
    if scenario not in SCENARIOS:
        raise ConfigError(f"unknown scenario {scenario!r}; there are {', '.join(SCENARIOS)}")
    method_class(method)
    known = setting_fields()
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}; there are {', '.join(known)}")
        of = known[name]
        own = of.get("") or of.get(method) or next(iter(of.values()))
        check_option(own, value, flag(name))
    tables = [PRESETS] + ([RELEASED] if given.get("protocol") == "released" else [])
    settings: dict[str, Any] = {}
    for table in tables:
        for pattern, preset in table:
            if fnmatch(scenario, pattern):
                settings |= preset
    settings |= given
    options = {s: settings.get(s, f.default) for s, f in method_options(method).items()}
    common = {name: value for name, value in settings.items() if "" in known[name]}
    return Config(scenario=scenario, method=method, options=options, **common)


def unused_settings(settings: Mapping[str, Any]) -> set[str]:
    """The settings that the method and the scenario of a run do not use.

    Arguments:
        settings: all of them. Methods and scenarios of a script's own may use any.
    """
    method, scenario = settings.get("method"), settings.get("scenario")
    unused: set[str] = set()
    if isinstance(method, str) and method in METHODS:
        kind = METHODS[method]
        of_methods = {name for name, of in setting_fields().items() if "" not in of}
        unused |= of_methods - method_options(method).keys()
        unused |= {old for new, old in kind.replaces.items() if settings.get(new) is not None}
        unused |= set() if kind.keeps_directions else {"storage", "budget"}
        unused |= set() if kind.protects else {"unprotected"}
    if isinstance(scenario, str) and scenario in SCENARIOS:
        unused |= unused_by_scenario(scenario)
    return unused


def refuse_unused(configs: Sequence[Config], given: Mapping[str, Any]) -> None:
    """Reject a setting that was given and that none of the runs uses.

    Arguments:
        configs: of runs on one scenario, made from what was given.
        given: settings by name, as for `resolve`.
    """
    scenario, methods = configs[0].scenario, [config.method for config in configs]
    idle = set.intersection(*(unused_settings(config.as_dict()) for config in configs))
    for name, value in given.items():
        if value is None or name not in idle:
            continue
        if name in unused_by_scenario(scenario):
            raise ConfigError(f"{scenario} does not use {flag(name)}")
        instead = [new for m in methods for new, old in METHODS[m].replaces.items() if old == name]
        given_too = [flag(new) for new in instead if given.get(new) is not None]
        beside = f" beside {given_too[0]}" if given_too else ""
        verb = "does" if len(methods) == 1 else "do"
        raise ConfigError(f"{', '.join(methods)} {verb} not use {flag(name)}{beside}")


def describe_default(name: str) -> str:
    """The default of a setting and the scenarios that have another one, for people."""
    defaults = {_shown(of.default): None for of in setting_fields()[name].values()}
    others = [f"{_shown(preset[name])} for {p}" for p, preset in PRESETS if name in preset]
    protocol = [
        f"{_shown(preset[name])} with --protocol released" + ("" if p == "*" else f" for {p}")
        for p, preset in RELEASED
        if name in preset
    ]
    return ", ".join([*defaults, *others, *protocol])


def _shown(value: Any) -> str:
    shown = {"": "none", "None": "none", "True": "yes", "False": "no"}
    return shown.get(str(value), f"{value:g}" if isinstance(value, float) else str(value))
