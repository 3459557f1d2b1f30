"""The configuration of a run, with presets for the benchmarks, and the way from it to a trace."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from fnmatch import fnmatch
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, final

import torch

from forgetless.data import (
    Scenario,
    ScenarioOptions,
    build_scenario,
    scenario_defaults,
    scenario_settings,
    unused_by_scenario,
)
from forgetless.methods import METHODS, Method, build_method, method_class, method_options
from forgetless.support.files import LOCK, FolderLock, is_locked
from forgetless.support.plugins import absolute, short_name
from forgetless.support.validation import (
    ConfigError,
    ForgetlessWarning,
    TraceError,
    check_option,
    flag,
    option,
    require,
    unknown,
)
from forgetless.trace import Keep, RunStatus, Trace, is_trace, run_status
from forgetless.training.build import flat_config, make_learner
from forgetless.training.fit import fit
from forgetless.training.models import ModelFactory, ModelOptions, model_defaults, model_settings
from forgetless.training.settings import Observer, Training

_MOST_SEEDS = 1000
PROTOCOLS = ("corrected", "released")
ALL_RUNS = ""  # in place of a method's name: the setting is one of all runs
_NOT_IN_TRACE = frozenset({"seeds", "device", "protocol", "online"})  # settings of all runs

# Other values than the defaults, for the scenarios that match a pattern; later ones win.
# MNIST and CIFAR-100: the settings of the paper's experiments.
PRESETS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("*-mnist", {"train_per_class": 1000, "ewc_strength": 10.0}),
    ("rotated-*mnist", {"tasks": 15}),
    ("permuted-*mnist", {"tasks": 15}),
    ("split-*mnist", {"epochs": 5}),
    (
        "*-cifar100",
        {"model": "lenet", "hidden": 200, "epochs": 50, "samples": 2500, "ewc_strength": 25.0},
    ),
    ("split-cifar100", {"tasks": 20, "classes_per_task": 5}),
    ("*-cifar10", {"model": "lenet", "hidden": 200}),
    ("*-digits", {"lr": 0.05, "samples": 1000, "ewc_strength": 50.0}),
    ("rotated-digits", {"step_degrees": 15.0}),
)
RELEASED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("*", {"centred": True, "ewc_fisher": "released", "agem_heads": "released"}),
    ("split-cifar100", {"freeze": "convolutions", "eval_mode_after": 1000}),
)
# One pass over the stream of tasks in batches of ten, as in most of the literature.
ONLINE = {"epochs": 1, "batch_size": 10}
COMPARISON = "comparison.json"


@final
@dataclass(frozen=True, kw_only=True)
class Config(Training, ModelOptions, ScenarioOptions):
    """The settings of a run.

    Attributes:
        options: the method's own settings by name, as `method_options` lists them.
    """

    scenario: str
    method: str
    seeds: str = option("1", "How many seeds (5 means 0 to 4), or which ones (3,7).")
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto takes a GPU if there is one.")
    protocol: str = option(
        "corrected",
        "The methods as the paper's text has them, or as its released code has them.",
        choices=PROTOCOLS,
    )
    online: bool = option(
        False,
        "One pass over the stream of tasks: one epoch, and --batch-size 10 unless it is given.",
    )
    heads: str = option(
        "",
        "Where tasks have outputs of their own: how the names of the parameters of the layers that "
        "make these begin, comma-separated, if it is not the last layer alone.",
    )
    options: Mapping[str, Any] = field(default_factory=dict)

    def head_list(self) -> tuple[str, ...] | None:
        """The prefixes in `heads`; None if there are none, for the last layer."""
        parts = tuple(part.strip() for part in self.heads.split(",") if part.strip())
        return parts or None

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
        """The method with its options, built at the first call."""
        return self._method

    @cached_property
    def _method(self) -> Method[Any]:
        return build_method(self.method, self.options)

    def __getstate__(self) -> dict[str, Any]:
        """Without the method: its class may be in a file that another process has yet to load."""
        return {name: value for name, value in vars(self).items() if name != "_method"}

    def as_dict(self) -> dict[str, Any]:
        """The settings that the run uses, flat, as its trace has them."""
        tasks = {"scenario": self.scenario, **scenario_settings(self.scenario, self)}
        found = flat_config(tasks, model_settings(self), self.build_method(), self)
        heads = self.head_list()
        return found if heads is None else found | {"heads": ",".join(heads)}

    @property
    def method_name(self) -> str:
        """The name of the method; of one in a file, the name that its class has."""
        return method_class(self.method).name

    @property
    def title(self) -> str:
        """The names of the scenario and the method."""
        return f"{short_name(self.scenario)} {self.method_name}"

    def with_options(self, **options: Any) -> "Config":
        """The same configuration with other settings of the method."""
        return replace(self, options={**self.options, **options})

    def with_method(self, method: str, **options: Any) -> "Config":
        """The same configuration with another method and its options."""
        other = {"scenario", "method", "options"}
        common = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in other}
        return resolve(self.scenario, method, **common | options)


def setting_fields() -> dict[str, dict[str, Field[Any]]]:
    """Setting → its fields by the name of the method, or under `ALL_RUNS`."""
    found = {f.name: {ALL_RUNS: f} for f in fields(Config) if f.name != "options"}
    for name in METHODS:
        for setting, option_field in method_options(name).items():
            found.setdefault(setting, {})[name] = option_field
    return found


def resolve(
    scenario: str, method: str, own: Mapping[str, Any] | None = None, **given: Any
) -> Config:
    """The configuration of a run: defaults, then the scenario's preset, then what was given.

    Arguments:
        scenario, method: names; `forgetless list` shows them. Or plug-ins, as `model` may be.
        own: options of the method, whatever other settings are called.
        given: settings by name; None means not given. Settings of other methods are only checked.
    """
    scenario, method = absolute(scenario), absolute(method)
    known, fields_of_method = setting_fields(), method_options(method)
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in known and name not in fields_of_method:
            raise ConfigError(unknown("setting", name, known))
        of_all, first = known.get(name, {}), next(iter(known.get(name, {}).values()), None)
        own_field = of_all.get(ALL_RUNS) or fields_of_method.get(name) or first
        check_option(own_field, value, flag(name))  # type: ignore[arg-type]
    tables = [PRESETS] + ([RELEASED] if given.get("protocol") == "released" else [])
    preset: dict[str, Any] = {}
    for table in tables:
        for pattern, values in table:
            if fnmatch(scenario, pattern):
                preset |= values
    if given.get("online"):
        preset |= ONLINE
        once = given.get("epochs", 1) == 1
        require(once, "--epochs", given.get("epochs"), "1 with --online, which is a single pass")
    model = absolute(given.get("model", preset.get("model", ModelOptions.model)))
    settings = preset | scenario_defaults(scenario) | model_defaults(model) | given
    common = {name: value for name, value in settings.items() if ALL_RUNS in known.get(name, {})}
    common["model"] = model
    # Presets are for built-in methods. An option of a plug-in that is called as a setting of all
    # runs, such as lr, is set in `own` only.
    usual = settings if method in METHODS else {n: v for n, v in given.items() if n not in common}
    options = {}
    for name, option_field in fields_of_method.items():
        if own is not None and name in own:
            check_option(option_field, own[name], f"--set {name}")
            options[name] = own[name]
        elif name in usual:
            options[name] = usual[name]
        elif option_field.default is not MISSING:
            options[name] = option_field.default
        elif option_field.default_factory is MISSING:
            raise ConfigError(f"{method_class(method).name} needs --set {name}=…")
    return Config(scenario=scenario, method=method, options=options, **common)


def refuse_unused(configs: Sequence[Config], given: Mapping[str, Any]) -> None:
    """Reject a setting that was given and that none of the runs uses.

    Arguments:
        configs: those of runs on one scenario, made from `given`.
        given: settings by name, as for `resolve`.
    """
    scenario, methods = configs[0].scenario, [config.method_name for config in configs]
    kinds = [method_class(config.method) for config in configs]
    used = _NOT_IN_TRACE.union(*(config.as_dict() for config in configs))
    for name, value in given.items():
        if value is not None and name in unused_by_scenario(scenario, given):
            raise ConfigError(f"{short_name(scenario)} does not use {flag(name)}")
        if value is not None and name in configs[0].unused:
            raise ConfigError(f"{flag(name)} is only for {configs[0].unused[name]}")
        if value is None or name in used:
            continue
        instead = [new for m in kinds for new, old in m.replaces.items() if old == name]
        given_too = [flag(new) for new in instead if given.get(new) is not None]
        besides = f" with {given_too[0]}" if given_too else ""
        verb = "does" if len(methods) == 1 else "do"
        raise ConfigError(f"{', '.join(methods)} {verb} not use {flag(name)}{besides}")


def describe_default(name: str) -> str:
    """The default of a setting, and the scenarios with another one, in words."""
    defaults = {_shown(f.default): None for f in setting_fields()[name].values()}
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


def scenario(name: str, *, data: str | Path | None = None, **options: Any) -> Scenario:
    """A benchmark by its name, such as "rotated-mnist", with its preset.

    Arguments:
        name: as `forgetless list` shows it.
        data: folder with datasets; by default FORGETLESS_DATA or the user's cache.
        options: what the benchmark has, such as `tasks=3` or `train_per_class=100`.

    Example:
        >>> digits = scenario("rotated-digits", tasks=3, train_per_class=10)
        >>> digits.n_tasks, digits.task(0, seeds=[0]).train.inputs.shape
        (3, torch.Size([100, 1, 8, 8]))
    """
    config = resolve(name, "sgd", **options)
    return build_scenario(name, config, None if data is None else Path(data))


def run(
    config: Config,
    *,
    seeds: tuple[int, ...] | None = None,
    data: Path | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    keep: Keep = "all",
    checkpoint_every: float = 5.0,
    on_checkpoint: Callable[[], None] | None = None,
    observer: Observer | None = None,
) -> Trace:
    """Train as the configuration says, or resume the unfinished run in `out`.

    Arguments:
        seeds: those of the configuration's seeds to train; all by default.
    """
    tasks = build_scenario(config.scenario, config, data)
    return fit(
        tasks,
        config.build_method(),
        ModelFactory(config, tasks.input_shape, tasks.n_outputs),
        seeds=config.seed_list() if seeds is None else seeds,
        training=config,
        device=config.device,
        heads=config.head_list(),
        out=out,
        overwrite=overwrite,
        keep=keep,
        checkpoint_every=checkpoint_every,
        on_checkpoint=on_checkpoint,
        observer=observer,
    )


def check_names(configs: Sequence[Config], data: Path | None) -> None:
    """Reject names of parameters that the model does not have, before any run begins."""
    for config in configs:
        if config.freeze or config.unprotected or config.heads:
            tasks = build_scenario(config.scenario, config, data)
            model = ModelFactory(config, tasks.input_shape, tasks.n_outputs)
            method, first = config.build_method(), config.seed_list()[:1]
            device = torch.device("cpu")
            make_learner(tasks, method, model, first, config, config.head_list(), device)


def status_of(folder: Path, config: Config, keep: Keep | None = None) -> RunStatus:
    """What a folder holds of the run with these settings; see `run_status`."""
    return run_status(folder, config.as_dict(), config.seed_list(), keep)


@contextmanager
def output_folder(
    out: Path | None, name: str, parts: Mapping[str, Config], *, overwrite: bool, resume: bool
) -> Iterator[tuple[Path, Mapping[str, RunStatus]]]:
    """A folder for results, and the state of the runs in it; made at once, to be found taken.

    Without `out` it is the latest of runs/NAME, runs/NAME-2, … that holds the same runs unfinished,
    or else a new one. An `out` that holds other runs needs `overwrite`, one that holds the same
    runs complete needs `overwrite` or `resume`, and one that holds other files is rejected. The
    folder is removed if it stays empty.

    Arguments:
        parts: the configuration of each run, by the name of its folder in this one.
    """
    created: list[Path] = []
    states: Mapping[str, RunStatus] = dict.fromkeys(parts, RunStatus("nothing"))
    try:
        if out is not None:
            folder, states = out, _accepted_states(out, parts, overwrite, resume)
            _make(out, created)
        else:
            found = _unfinished(Path("runs"), name, parts)
            folder, states = found or (_make_new(Path("runs"), name, created), states)
        # A single run locks its folder by itself.
        with FolderLock(folder) if len(parts) > 1 else nullcontext():
            yield folder, states
    finally:
        for empty in (f for f in reversed(created) if not any(f.iterdir())):
            empty.rmdir()


def _accepted_states(
    folder: Path, parts: Mapping[str, Config], overwrite: bool, resume: bool
) -> Mapping[str, RunStatus]:
    """The states of the runs in a folder, unless it must not be used."""
    nothing: Mapping[str, RunStatus] = dict.fromkeys(parts, RunStatus("nothing"))
    if folder.exists() and not folder.is_dir():
        raise TraceError(f"--out {folder} cannot be a folder: it is a file")
    # A run that was killed early leaves folders with nothing but locks in them.
    if not any(f.is_file() and f.name != LOCK for f in folder.rglob("*")):
        return nothing
    of_runs = is_trace(folder) or (folder / COMPARISON).is_file()
    if overwrite and of_runs:
        return nothing
    try:
        states = {part: status_of(folder / part, config) for part, config in parts.items()}
    except TraceError as error:
        raise TraceError(f"{error}; choose another folder or add --overwrite") from error
    found = {status.kind for status in states.values()}
    if found == {"nothing"} and not of_runs:
        raise TraceError(f"--out {folder} holds files that are not a run's; choose another folder")
    if overwrite:
        return nothing
    if "other" in found or (found == {"nothing"} and is_trace(folder)):
        differences = [f": {s.difference}" for s in states.values() if s.difference] or [""]
        raise TraceError(
            f"--out {folder} holds another run{differences[0]}; choose another folder or add "
            "--overwrite"
        )
    if found == {"complete"} and not resume:
        raise TraceError(
            f"--out {folder} holds this run, complete; --resume shows its results, --overwrite "
            "runs it again"
        )
    return states


def _unfinished(
    root: Path, name: str, parts: Mapping[str, Config]
) -> tuple[Path, Mapping[str, RunStatus]] | None:
    """The latest folder with the same runs unfinished, if no process is writing it."""
    latest = None
    for n in count(1):
        folder = _numbered(root, name, n)
        if not folder.is_dir():
            return latest
        # Locks first: a run that is completed in the meantime must not be found unfinished.
        if any(is_locked(f) for f in (folder, *(folder / part for part in parts))):
            continue
        try:
            states = {part: status_of(folder / part, config) for part, config in parts.items()}
        except TraceError as error:
            warnings.warn(f"{error}; it is left as it is", ForgetlessWarning, stacklevel=2)
            continue
        found = {status.kind for status in states.values()}
        begun = "unfinished" in found or found == {"complete", "nothing"}
        if begun and "other" not in found:
            latest = folder, states
    return latest


def _numbered(root: Path, name: str, n: int) -> Path:
    return root / (name if n == 1 else f"{name}-{n}")


def _make(folder: Path, created: list[Path]) -> Path:
    """Make a folder and those above it, noting which are new."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        for path in reversed(missing):
            path.mkdir()
            created.append(path)
    except OSError as error:
        raise TraceError(f"--out {folder} cannot be made: {error.strerror}") from error
    return folder


def _make_new(root: Path, name: str, created: list[Path]) -> Path:
    _make(root, created)
    for n in count(1):
        folder = _numbered(root, name, n)
        try:
            folder.mkdir()  # atomic: of two runs that start together, one gets it
        except FileExistsError:
            continue
        created.append(folder)
        return folder
    raise TraceError(f"no new folder can be made in {root}")
