"""The command `forgetless tune`: the best settings of methods, chosen on held-out images."""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from forgetless.cli.groups import completing
from forgetless.cli.options import (
    Address,
    CheckpointEvery,
    DataFolder,
    EngineName,
    Jobs,
    Overwrite,
    Scenario,
    Set,
    engine_for,
    grids_from,
    method_names,
    values_to_set,
    with_config_options,
)
from forgetless.cli.progress import Board, say
from forgetless.launch.engines import InProcess
from forgetless.launch.runs import refuse_unused, resolve
from forgetless.launch.search import (
    SAMPLERS,
    SEARCH_FILE,
    SEARCH_SEEDS,
    TRIALS,
    Candidate,
    NamedRuns,
    Search,
    SettingsSampler,
    Trial,
    candidates_for,
    check_held_out,
    described,
    new_search,
    protocol_of,
    run_search,
    sampler_for,
    search_folder,
    settings_for,
    warn_of_other_code,
)
from forgetless.methods import method_label
from forgetless.support.files import is_shared
from forgetless.support.plugins import short_name
from forgetless.support.statistics import std
from forgetless.support.validation import ConfigError


@with_config_options
def tune_command(
    scenario: Scenario,
    methods: Annotated[
        list[str],
        typer.Option(
            "--methods",
            "--method",
            metavar="NAMES",
            help="Methods, comma-separated or repeated. Or your own, my_file.py:OWM.",
            autocompletion=completing(method_names),
        ),
    ],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="[METHOD:]NAME=VALUES",
            help="Values to try of an option, comma-separated: of all methods that have it, or of "
            "one; repeat it for several options. Others have the values that `forgetless list "
            "METHOD` shows; an option that is given a value is not searched.",
        ),
    ] = None,
    to_set: Set = None,
    sampler: Annotated[
        str,
        typer.Option(
            "--sampler",
            metavar="|".join(SAMPLERS),
            autocompletion=completing(lambda: SAMPLERS),
            help="Try all combinations, or let Optuna choose between the least and the greatest "
            "value of each option.",
        ),
    ] = "grid",
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            metavar="N",
            help=f"tpe: settings to try of each method.  [default: {TRIALS}]",
        ),
    ] = None,
    extend: Annotated[
        bool,
        typer.Option(
            "--extend",
            help="grid: go on around the best settings, beyond the grid if they lie at its end, "
            "until the next smaller and larger value of each option were tried.",
        ),
    ] = False,
    seeds: Annotated[
        str,
        typer.Option(
            "--seeds", help="Seeds of each trial: how many (3 means 0 to 2), or which ones."
        ),
    ] = SEARCH_SEEDS,
    validation_per_class: Annotated[
        int | None,
        typer.Option(
            "--validation-per-class",
            metavar="N",
            help="Training images of each class that are held out and measured on; the test set is "
            "never used. [default: 100, 50 for *-cifar100, 20 for *-digits; at most a fifth of "
            "--train-per-class]",
            show_default=False,
        ),
    ] = None,
    data: DataFolder = None,
    out: Annotated[
        str | None,
        typer.Option("--out", help=f"Folder for {SEARCH_FILE}.  [default: one in runs/]"),
    ] = None,
    overwrite: Overwrite = False,
    checkpoint_every: CheckpointEvery = 5.0,
    engine: EngineName = "local",
    address: Address = None,
    jobs: Jobs = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the choices as JSON and nothing else.")
    ] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Choose each method's settings on held-out training images of SCENARIO.

    Every trial is trained with several seeds; the settings with the highest mean accuracy are
    chosen. The same command resumes an interrupted search. `forgetless compare SCENARIO --best
    FILE` then trains the choices with other seeds, on the test set.
    """
    names = [name.strip() for name in ",".join(methods).split(",") if name.strip()]
    own = values_to_set(to_set or [], names)
    given = {**settings, "seeds": seeds, "validation_per_class": validation_per_class}
    given = settings_for(scenario, given)
    candidates = candidates_for(names, grids_from(grid or [], names), given, own)
    samplers = {c.name: sampler_for(c, sampler, trials, extend=extend) for c in candidates}
    if engine == "local":  # elsewhere the data may be where the workers are
        check_held_out(scenario, given, data)
    configs = [resolve(scenario, name, own[name], **given) for name in names]
    refuse_unused(configs, settings)
    if out is not None and is_shared(out):
        raise ConfigError(f"--out {out} must be a folder, which a cluster's machines share too")
    protocol = protocol_of(given, configs[0].seed_list(), sampler, trials, extend=extend)
    found = new_search(
        scenario, candidates, NamedRuns(scenario, given, data, InProcess()), protocol, given
    )
    name = f"{short_name(scenario)}-tune"
    console = Console(stderr=True)
    with (
        search_folder(Path(out) if out else None, name, found, overwrite=overwrite) as folder,
        engine_for(engine, address, jobs) as trainer,
        Board(trainer.workers, console=console, lines=False) as board,
    ):
        bench = NamedRuns(scenario, given, data, trainer, board, checkpoint_every)
        warn_of_other_code(found, bench)
        if not as_json:
            _show_plan(found, candidates, samplers, folder, console)
        run_search(found, candidates, samplers, bench, folder, _Lines(found, console))
    if as_json:
        typer.echo(json.dumps(_summary(found), allow_nan=False))
        return
    Console().print(_table(found))
    _say_limits(found)
    command = ["forgetless", "compare", scenario, "--best", str(folder / SEARCH_FILE)]
    say(f"The choices and all trials are in {folder / SEARCH_FILE}. On the test set:")
    say(f"  {shlex.join(command)}")


@final
class _Lines:
    """Prints a line for every trial that is over.

    Arguments:
        search: with the trials of earlier commands.
        console: where to.
    """

    def __init__(self, search: Search, console: Console) -> None:
        self._console = console
        self._before = len(search.trials)
        self._started = time.monotonic()

    def __call__(self, trial: Trial, done: int, total: int) -> None:
        spent = time.monotonic() - self._started
        left = spent * (total - done) / max(1, done - self._before)
        found = "diverged" if trial.error else f"{trial.score:.2f} %"
        time_left = f", about {left:.0f} s left" if done < total else f", {spent:.0f} s in all"
        line = f"{done} of {total}: {trial.method} {described(trial.settings)}: {found}{time_left}"
        say(line, self._console)


def _show_plan(
    search: Search,
    candidates: Sequence[Candidate],
    samplers: Mapping[str, SettingsSampler],
    folder: Path,
    console: Console,
) -> None:
    """Say what is going to be tried, and what is known already."""
    total = sum(samplers[c.name].count for c in candidates)
    seeds = ", ".join(map(str, search.protocol["seeds"]))
    per_class = search.protocol.get("validation_per_class")
    images = f"{per_class} held-out images of each class" if per_class else "held-out samples"
    say(f"{search.scenario}: {total} trials, each with seeds {seeds}, on {images}", console)
    for candidate in candidates:
        values = [f"{d.name} {', '.join(map(_value, d.values))}" for d in candidate.space]
        count = samplers[candidate.name].count
        say(f"  {candidate.name} ({count}): {'; '.join(values) or 'as it is'}", console)
    if search.trials:
        done = "complete" if search.status == "complete" else "unfinished"
        say(f"{folder} has this search, {done}: {len(search.trials)} trials are known", console)


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(search: Search) -> Table:
    """The best settings of each method, and their score."""
    per_class = search.protocol.get("validation_per_class")
    title = f"{search.scenario}: best settings on held-out images"
    shape: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "min_width": 70}
    table = Table(title=title, caption_justify="left", **shape)
    table.add_column("method", style="bold")
    table.add_column("settings")
    for heading in ("A_T", "trials"):
        table.add_column(heading, justify="right")
    best = search.best
    for name in search.methods:
        if name not in best:
            count = sum(trial.method == name for trial in search.trials)
            table.add_row(method_label(name), "all diverged", "–", f"{count}")
            continue
        choice = best[name]
        spread = f" ± {std(choice.trial.average_accuracy):.2f}"
        several = len(choice.trial.average_accuracy) > 1
        score = f"{choice.score:.2f}" + (spread if several else "")
        settings = described(choice.settings) + ("*" if choice.limits else "")
        table.add_row(method_label(name), settings or "as they are", score, f"{choice.trials}")
    seeds = len(search.protocol["seeds"])
    images = f"{per_class} held-out training images of each class" if per_class else "held-out data"
    spread = f"; mean ± standard deviation of {seeds} seeds" if seeds > 1 else ""
    table.caption = f"A_T: mean accuracy on all tasks at the end, %, on {images}{spread}."
    return table


def _say_limits(search: Search) -> None:
    """Say which choices lie at an end of what was tried, or are no better than the others."""
    limits = {}
    for name, choice in search.best.items():
        scores = {round(t.score, 2) for t in search.trials if t.method == name}
        if choice.trials > 1 and len(scores) == 1:
            say(f"* {method_label(name)}: all settings have {choice.score:.2f}, so none is better")
        elif choice.limits:
            limits[name] = choice.limits
    for name, of in limits.items():
        say(f"* {method_label(name)}: {', '.join(of)}")
    if limits:
        extends = search.protocol["sampler"] == "grid" and not search.protocol["extend"]
        way = "--extend goes on there" if extends else "give a --grid that goes further"
        say(f"  Beyond the end of a grid there may be a better value: {way}.")


def _summary(search: Search) -> dict[str, Any]:
    """The choices, and the file that has all trials."""
    best = {
        name: {
            "settings": dict(choice.settings),
            "average_accuracy": list(choice.trial.average_accuracy),
            "forgetting": list(choice.trial.forgetting),
            "trials": choice.trials,
            "limits": list(choice.limits),
        }
        for name, choice in search.best.items()
    }
    parts = {"scenario": search.scenario, "best": best, "protocol": search.protocol}
    return {**parts, "out": str(search.path)}
