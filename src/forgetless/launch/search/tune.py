"""Search each method's settings on held-out training images, and resume a search."""

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from fnmatch import fnmatch
from itertools import count
from operator import index
from pathlib import Path
from typing import Any

import torch

from forgetless.data import Scenario, ScenarioOptions, build_scenario, unused_by_scenario
from forgetless.launch.engines import InProcess, Processes
from forgetless.launch.runs import resolve
from forgetless.launch.search.benches import NOT_SEARCHED, Asked, Bench, NamedRuns, OwnRuns
from forgetless.launch.search.record import SEARCH_FILE, Search, Trial, load_search
from forgetless.launch.search.samplers import SAMPLERS, TPE, Grid, SettingsSampler
from forgetless.launch.search.space import (
    Candidate,
    Score,
    Settings,
    key,
    options_of,
    searchable,
    space_of,
)
from forgetless.methods import METHODS, Method, method_class, method_settings
from forgetless.support.files import FolderLock, is_locked
from forgetless.support.plugins import code_of, short_name
from forgetless.support.progress import advance, bar_on_terminal
from forgetless.support.provenance import digest_of, versions
from forgetless.support.validation import (
    ConfigError,
    ForgetlessWarning,
    TraceError,
    TrainingError,
    require,
)
from forgetless.trace import Trace
from forgetless.trace.experiment import changed_settings
from forgetless.training.models import ModelSource

SEARCH_SEEDS = "100,101"  # those of a comparison are others
TRIALS = 20  # of each method, by TPE
_TRIALS = "trials"  # in the folder of a search, its runs while they are trained
# Training images of each class that are held out, by scenario; the last pattern that fits.
_HELD_OUT = (("*", 100), ("*-cifar100", 50), ("*-digits", 20))
_FEW = 5  # at most one in so many, where a scenario has fewer
_OF_TASKS = tuple(f.name for f in fields(ScenarioOptions))

Grids = Mapping[str, Sequence[Any]]
# Called with each trial that is over, how many are, and how many there are so far.
OnTrial = Callable[[Trial, int, int], None]


def held_out_images(scenario: str, train_per_class: int) -> int:
    """How many training images of each class a search holds out if it is not told.

    Arguments:
        train_per_class: how many there are; 0 for all of the source's.
    """
    usual = [number for pattern, number in _HELD_OUT if fnmatch(scenario, pattern)][-1]
    return min(usual, max(1, train_per_class // _FEW)) if train_per_class else usual


def held_out_samples(tasks: Scenario) -> int:
    """How many training samples of each class are held out of tasks that a script made."""
    counts = torch.bincount(tasks.task(0, (0,)).train.labels)
    fewest = int(counts[counts > 0].min())
    return min(_HELD_OUT[0][1], max(1, fewest // _FEW))


def candidates_for(
    methods: Sequence[str | Method[Any]],
    grids: Grids,
    fixed: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Candidate]:
    """The methods with the options that are searched.

    Arguments:
        methods: names, or methods; options of these that are not at their default are fixed.
        grids: values to try by option, of all methods that have it; "kron-ogd:energy" is of one.
        fixed: the settings of all runs that were given.
        own: options that were given, by the method's name in `methods`.
    """
    sources = [method if isinstance(method, str) else method.name for method in methods]
    kinds = [method_class(m) if isinstance(m, str) else type(m) for m in methods]
    distinct = bool(kinds) and len({kind.name for kind in kinds}) == len(kinds)
    require(distinct, "methods", ", ".join(map(str, sources)), "one or more different methods")
    _check_owners(grids, sources, kinds)
    found = []
    for method, source, kind in zip(methods, sources, kinds):
        options = dict((own or {}).get(source, {}))
        if not isinstance(method, str):
            settings, defaults = method_settings(method), options_of(kind)
            options |= {n: v for n, v in settings.items() if v != defaults[n].default}
        own_grids = _grids_of(grids, source, kind)
        space = space_of(kind, own_grids, {*fixed, *options})
        found.append(Candidate(kind.name, source, kind, options, space))
    return found


def _split_name(text: str) -> tuple[str, str]:
    """The method and the option in "kron-ogd:energy" or "lr"."""
    owner, _, name = text.rpartition(":")
    return owner, name.replace("-", "_")


def _is_owner(owner: str, source: str, kind: type[Method[Any]]) -> bool:
    return owner in (kind.name, source, short_name(source))


def _grids_of(grids: Grids, source: str, kind: type[Method[Any]]) -> dict[str, Sequence[Any]]:
    """The grids of a method: those of all methods that have the option, then its own."""
    split = [(*_split_name(text), values) for text, values in grids.items()]
    found = {n: values for owner, n, values in split if not owner and n in searchable(kind)}
    return found | {n: v for owner, n, v in split if owner and _is_owner(owner, source, kind)}


def _check_owners(grids: Grids, sources: Sequence[str], kinds: Sequence[type[Method[Any]]]) -> None:
    """Reject grids that are of no method."""
    pairs = list(zip(sources, kinds))
    names = ", ".join(kind.name for kind in kinds)
    for text in grids:
        owner, name = _split_name(text)
        if owner:
            known = any(_is_owner(owner, source, kind) for source, kind in pairs)
            require(known, f"the method in the grid {text}", owner, f"one of {names}")
        elif not any(name in searchable(kind) for kind in kinds):
            raise ConfigError(
                f"the grid of {name} is of no option that can be searched of {names}; "
                "forgetless list METHOD shows them"
            )


def sampler_for(
    candidate: Candidate, name: str, trials: int | None = None, *, extend: bool = False
) -> SettingsSampler:
    """The sampler that --sampler, --trials and --extend ask for."""
    require(name in SAMPLERS, "--sampler", name, " or ".join(SAMPLERS))
    if name == "grid":
        if trials is not None:
            raise ConfigError(f"--trials {trials} is only for --sampler tpe")
        return Grid(candidate.space, extend=extend)
    if extend:
        raise ConfigError("--extend is only for --sampler grid")
    return TPE(candidate.space, TRIALS if trials is None else trials)


def settings_for(scenario: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of all runs of a search: what was given, its seeds and held-out images."""
    settings = {name: value for name, value in given.items() if value is not None}
    settings.setdefault("seeds", SEARCH_SEEDS)
    config = resolve(scenario, "sgd", train_per_class=settings.get("train_per_class"))
    if "validation_per_class" not in unused_by_scenario(config.scenario, {}):
        usual = held_out_images(config.scenario, config.train_per_class)
        held_out = settings.setdefault("validation_per_class", usual)
        accepted = "at least 1: a search never measures on the test set"
        require(held_out != 0, "--validation-per-class", held_out, accepted)
    return settings


def check_held_out(scenario: str, given: Mapping[str, Any], data: Path | None) -> None:
    """Reject tasks with too few samples, and those that are measured on their test samples."""
    config = resolve(scenario, "sgd", **{n: given.get(n) for n in _OF_TASKS})
    if build_scenario(config.scenario, config, data).measured_on != "validation":
        raise ConfigError(
            f"{short_name(scenario)} would be searched on its test samples: give the function a "
            "parameter validation_per_class, and measure on so many training samples of each class"
        )


def protocol_of(
    given: Mapping[str, Any],
    seeds: Sequence[int],
    sampler: str,
    trials: int | None,
    *,
    extend: bool,
) -> dict[str, Any]:
    """How a search chooses: seeds, held-out images and sampler."""
    held_out = {n: given[n] for n in ("validation_per_class", "validation_seed") if n in given}
    way = {"extend": extend} if sampler == "grid" else {"trials": trials or TRIALS}
    return {"seeds": list(seeds), **held_out, "sampler": sampler, **way}


def new_search(
    scenario: str,
    candidates: Sequence[Candidate],
    bench: Bench,
    protocol: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Search:
    """A search without trials, and settings that are known to be good."""
    for candidate in candidates:
        for settings in next(iter(Grid(candidate.space).rounds(lambda _: None))):
            bench.check((candidate, settings))
    common: dict[str, Any] = {}
    for candidate in candidates:
        common |= bench.common(candidate)
    lasting = {name: value for name, value in given.items() if name not in NOT_SEARCHED}
    methods = {
        candidate.name: {
            "source": candidate.source,
            "code": _code_of(candidate.kind),
            "given": dict(candidate.options),
            "options": bench.options(candidate),
            "searched": {d.name: list(d.values) for d in candidate.space},
        }
        for candidate in candidates
    }
    kinds = {candidate.name: candidate.kind for candidate in candidates}
    return Search(scenario, dict(protocol), lasting, methods, common, kinds=kinds)


def _code_of(kind: type[Method[Any]]) -> str:
    """A checksum of the code of a method of one's own; empty for one of this package."""
    return "" if METHODS.get(kind.name) is kind else digest_of(code_of(kind))


def run_search(
    search: Search,
    candidates: Sequence[Candidate],
    samplers: Mapping[str, SettingsSampler],
    bench: Bench,
    folder: Path | None = None,
    on_trial: OnTrial | None = None,
) -> None:
    """Train what has no result yet, round by round, and write the file after every trial.

    Arguments:
        search: with the trials so far.
        samplers: of each method.
        folder: of the search's file and of its runs while they are trained.
    """
    number = search.note_versions(versions(bench.device))
    places: dict[tuple[str, str], int] = {}
    rounds = {c.name: samplers[c.name].rounds(_score(search, c.name)) for c in candidates}
    with tempfile.TemporaryDirectory(prefix="forgetless-") as scratch:
        runs = Path(scratch) if folder is None else folder / _TRIALS
        while rounds:
            asked: list[Asked] = []
            for candidate in (c for c in candidates if c.name in rounds):
                new = next(rounds[candidate.name], None)
                if new is None:
                    del rounds[candidate.name]
                asked += [(candidate, settings) for settings in new or ()]
            missing: list[Asked] = []
            for candidate, settings in asked:
                place = candidate.name, key(settings)
                if place not in places and search.result(candidate.name, settings) is None:
                    missing.append((candidate, settings))
                places.setdefault(place, len(places))
            total = max(len(places), sum(samplers[c.name].count for c in candidates))
            with closing(bench.trained(missing, runs)) as coming:
                for n, outcome in coming:
                    if isinstance(outcome, Trace):
                        search.note_fingerprint(outcome)
                    trial = _trial(missing[n], outcome, number)
                    search.trials.append(trial)
                    _save(search, folder, places)
                    if on_trial is not None:
                        on_trial(trial, len(search.trials), total)
    best = search.best
    search.limits = {n: samplers[n].limits(choice.settings) for n, choice in best.items()}
    search.status = "complete"
    _save(search, folder, places)
    if folder is not None:
        shutil.rmtree(folder / _TRIALS, ignore_errors=True)


def _score(search: Search, method: str) -> Score:
    def score(settings: Settings) -> float | None:
        trial = search.result(method, settings)
        return None if trial is None else trial.score

    return score


def _trial(asked: Asked, outcome: Any, number: int) -> Trial:
    candidate, settings = asked
    if isinstance(outcome, TrainingError):
        return Trial(candidate.name, settings, error=str(outcome), made_with=number)
    return Trial.of(candidate.name, settings, outcome, number)


def _save(search: Search, folder: Path | None, places: Mapping[tuple[str, str], int]) -> None:
    """Write the file, with the trials in the order in which they were proposed."""
    methods = list(search.methods)

    def place(trial: Trial) -> tuple[int, int]:
        asked = places.get((trial.method, key(trial.settings)), len(places))
        return methods.index(trial.method), asked

    search.trials.sort(key=place)
    if folder is not None:
        search.save(folder / SEARCH_FILE)


@contextmanager
def search_folder(
    out: Path | None, name: str, search: Search, *, overwrite: bool = False
) -> Iterator[Path]:
    """A folder for a search, which gets the trials that the same search left in it.

    Without `out` it is the first of runs/NAME, runs/NAME-2, … that holds the same search, or else
    a new one. An `out` that holds another search needs `overwrite`.

    Arguments:
        search: without trials.
        overwrite: discard earlier trials.
    """
    folder = _same_or_new(Path("runs"), name, search) if out is None else out
    if folder.exists() and not folder.is_dir():
        raise TraceError(f"--out {folder} cannot be a folder: it is a file")
    file = folder / SEARCH_FILE
    inside = [f.name for f in folder.iterdir()] if folder.is_dir() else []
    # A search that was killed early leaves its lock and temporary files.
    foreign = any(name != _TRIALS and not name.startswith(".") for name in inside)
    if foreign and not file.is_file():
        raise TraceError(f"--out {folder} holds files that are not a search's; choose another one")
    with FolderLock(folder):
        if overwrite:
            shutil.rmtree(folder / _TRIALS, ignore_errors=True)
        elif file.is_file():
            known = load_search(file)
            difference = changed_settings(known.identity, search.identity)
            if difference:
                raise TraceError(
                    f"--out {folder} holds another search: {difference}; choose another folder or "
                    "add --overwrite"
                )
            search.trials, search.made_with = known.trials, known.made_with
            search.fingerprint = known.fingerprint
            search.status = known.status
        search.save(file)
        yield folder


def _same_or_new(root: Path, name: str, search: Search) -> Path:
    for n in count(1):
        folder = root / (name if n == 1 else f"{name}-{n}")
        if not folder.exists():
            break
        if is_locked(folder) or not (folder / SEARCH_FILE).is_file():
            continue
        try:
            known = load_search(folder)
        except TraceError as error:
            warnings.warn(f"{error}; it is left as it is", ForgetlessWarning, stacklevel=2)
            continue
        if not changed_settings(known.identity, search.identity):
            break
    return folder


def warn_of_other_code(search: Search, bench: Bench) -> None:
    """Say that some of the trials were made by another version or on another device."""
    here = versions(bench.device)
    others = [there for there in search.made_with if there != here]
    if others and search.trials:
        warnings.warn(
            f"{search.path} has trials that were made otherwise: "
            f"{changed_settings(others[-1], here)}; --overwrite searches anew",
            ForgetlessWarning,
            stacklevel=2,
        )


def tune(
    scenario: str | Scenario,
    methods: Sequence[str | Method[Any]],
    *,
    grid: Grids | None = None,
    model: ModelSource | None = None,
    seeds: Sequence[int] = (100, 101),
    sampler: str = "grid",
    trials: int | None = None,
    extend: bool = False,
    data: str | Path | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    jobs: int = 1,
    on_trial: OnTrial | None = None,
    **settings: Any,
) -> Search:
    """Search each method's settings on held-out training images, never on the test set.

    `search.best["ewc"]` has the method and the training with the best settings:

        fit(tasks, best.method, training=best.training, seeds=5)

    Arguments:
        scenario: a benchmark's name, or tasks.
        methods: their names, or methods; options of these that are not at their default stay.
        grid: values to try by option, such as {"lr": (0.01, 0.1), "kron-ogd:energy": (0.9, 0.95)};
            other options have the values that they declare, unless a setting is given.
        model: for tasks of your own, as `fit` takes it.
        seeds: of each trial.
        sampler: "grid", or "tpe" of Optuna.
        trials: how many settings of each method TPE tries; 20 by default.
        extend: if the best value lies at the end of a grid, go on beyond it.
        data: folder with datasets.
        out: folder for the file of the search; the same call with it resumes.
        overwrite: search anew.
        jobs: trials at a time, for a benchmark and methods by their names.
        on_trial: called with each trial that is over, how many are, and how many there are.
        settings: of all runs, such as epochs=5, and for a benchmark tasks=3; in particular
            validation_per_class, the training images of each class that are held out.
    """
    chosen = tuple(index(seed) for seed in seeds)
    require(bool(chosen) and len(set(chosen)) == len(chosen), "seeds", seeds, "distinct seeds")
    candidates = candidates_for(methods, grid or {}, settings)
    samplers = {c.name: sampler_for(c, sampler, trials, extend=extend) for c in candidates}
    bench: Bench
    if isinstance(scenario, str):
        require(model is None, "model", model, "left out: a benchmark's is a name, model='lenet'")
        numbers = ",".join(map(str, chosen)) + "," * (len(chosen) == 1)
        given = settings_for(scenario, {**settings, "seeds": numbers})
        place = None if data is None else Path(data)
        check_held_out(scenario, given, place)
        engine = InProcess() if jobs == 1 else Processes(jobs)
        bench, name = NamedRuns(scenario, given, place, engine), scenario
    else:
        own = isinstance(scenario, Scenario)
        require(own, "scenario", scenario, "the name of a benchmark, or tasks: a Scenario")
        require(jobs == 1, "jobs", jobs, "1 for tasks that a script made")
        given = {"validation_per_class": held_out_samples(scenario), **settings}
        bench, name = OwnRuns(scenario, model, given, chosen), scenario.name
    protocol = protocol_of(given, chosen, sampler, trials, extend=extend)
    found = new_search(name, candidates, bench, protocol, given)

    def tell(trial: Trial, done: int, total: int) -> None:
        advance("trials", done, total)
        if on_trial is not None:
            on_trial(trial, done, total)

    with bar_on_terminal("search"):
        if out is None:
            run_search(found, candidates, samplers, bench, None, tell)
            return found
        with search_folder(Path(out), "", found, overwrite=overwrite) as folder:
            run_search(found, candidates, samplers, bench, folder, tell)
    return found
