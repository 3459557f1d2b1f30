"""The commands `forgetless run` and `forgetless compare`."""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast, final

import typer
from rich.console import Console

from forgetless.cli.groups import completing
from forgetless.cli.options import (
    Address,
    Analyse,
    CheckpointEvery,
    DataFolder,
    EngineName,
    Jobs,
    Json,
    Kept,
    Log,
    Out,
    OutPlace,
    Overwrite,
    Resume,
    Scenario,
    Set,
    engine_for,
    method_names,
    values_to_set,
    with_config_options,
)
from forgetless.cli.progress import Board, say, say_report
from forgetless.data import build_scenario
from forgetless.launch.engines import (
    Engine,
    InProcess,
    Order,
    download,
    download_state,
    local_copy,
    train,
    upload,
)
from forgetless.launch.rebuild import FromScript
from forgetless.launch.runs import (
    COMPARISON,
    Config,
    check_names,
    output_folder,
    refuse_unused,
    resolve,
)
from forgetless.launch.search import SEARCH_FILE, best_configs, load_search
from forgetless.report import as_csv, as_latex, comparison_table, ranking, task_table
from forgetless.report.loggers import logger_names
from forgetless.report.page import PAGE, make_report
from forgetless.report.plots import accuracy_matrices, save
from forgetless.support.files import is_shared, without_password, write_atomically
from forgetless.support.plugins import is_in_file, short_name
from forgetless.support.statistics import TESTS, Test
from forgetless.support.validation import ForgetlessError, TrainingError, require
from forgetless.trace import KEEPS, RunStatus, Trace, load_trace
from forgetless.training.models import ModelFactory

_METHODS = "sgd,ewc,a-gem,ogd,pca-ogd"
_SEEDS_OF_BEST = "5"


@with_config_options
def run_command(
    scenario: Scenario,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="The method against forgetting. Or your own, my_file.py:OWM.",
            autocompletion=completing(method_names),
        ),
    ],
    to_set: Set = None,
    data: DataFolder = None,
    out: Out = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    checkpoint_every: CheckpointEvery = 5.0,
    keep: Kept = "all",
    log: Log = "",
    as_json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Train one method on the tasks of SCENARIO and show what was forgotten."""
    own = values_to_set(to_set or [], [method])
    config = resolve(scenario, method, own[method], **settings)
    parts = {".": config}
    _check(parts, settings, keep, checkpoint_every, log)
    name = config.title.replace(" ", "-")
    with output_folder(out, name, parts, overwrite=overwrite, resume=resume) as (folder, states):
        orders = _orders(parts, folder, data, keep, checkpoint_every, states)
        (trace,) = _traces(orders, states.values(), InProcess(), log)
        picture = save(accuracy_matrices([trace]), folder / "accuracy.png")
        make_report([trace], folder / PAGE)
    if as_json:
        typer.echo(json.dumps(trace.summary(), allow_nan=False))
        return
    console = Console()
    console.print(task_table(trace))
    console.print(comparison_table([trace]))
    say(f"Results are in {folder}; a picture of what was forgotten is {picture}")
    say_report(folder / PAGE)


@with_config_options
def compare_command(
    scenario: Scenario,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            "--method",
            metavar="NAMES",
            help="Methods, comma-separated or repeated. Or your own, my_file.py:OWM.  "
            f"[default: {_METHODS}]",
            autocompletion=completing(method_names),
        ),
    ] = None,
    best: Annotated[
        Path | None,
        typer.Option(
            "--best",
            metavar="FILE",
            help="Train with the settings that `forgetless tune` chose, a search.json, and 5 "
            "seeds.  [default methods: all in it]",
        ),
    ] = None,
    to_set: Set = None,
    data: DataFolder = None,
    out: OutPlace = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    checkpoint_every: CheckpointEvery = 5.0,
    keep: Kept = "all",
    analyse: Analyse = None,
    engine: EngineName = "local",
    address: Address = None,
    jobs: Jobs = 1,
    log: Log = "",
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="METHOD",
            help="Test the others against this method.  [default: the best; all pairs are tested]",
        ),
    ] = None,
    test: Annotated[
        str,
        typer.Option(
            "--test",
            metavar="t|permutation",
            help="Paired over seeds, with Holm's correction: a t-test, or a permutation test, "
            "which needs more seeds.",
        ),
    ] = "t",
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the table as CSV, too.")
    ] = None,
    latex: Annotated[
        Path | None,
        typer.Option("--latex", metavar="FILE", help="Write the table as LaTeX (booktabs), too."),
    ] = None,
    as_json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Train several methods on the tasks of SCENARIO and show the results side by side."""
    if best is None:
        parts = _chosen_runs(scenario, ",".join(methods or [_METHODS]), to_set, settings)
    else:
        parts = _best_runs(best, scenario, methods, to_set, settings)
    _check(parts, settings, keep, checkpoint_every, log)
    TESTS.check("--test", test)
    known = ", ".join(parts)
    require(against is None or against in parts, "--against", against, f"one of {known}")
    tested = next((n for n, v in (("best", best), ("against", against), ("latex", latex)) if v), "")
    seeds = next(iter(parts.values())).seed_list()
    enough = f"two or more for the intervals and tests of --{tested}"
    require(not tested or len(seeds) > 1, "--seeds", settings.get("seeds", "1"), enough)
    started = time.perf_counter()
    shared = out.rstrip("/") if out is not None and is_shared(out) else None
    name = f"{short_name(scenario)}-compare"
    with (
        _opened(out, shared, name, parts, overwrite=overwrite, resume=resume) as (folder, states),
        engine_for(engine, address, jobs) as trainer,
    ):
        orders = _orders(parts, folder, data, keep, checkpoint_every, states, shared)
        if engine == "local":  # elsewhere the data may be where the workers are
            check_names([c for part, c in parts.items() if states[part].kind != "complete"], data)
        results = _Results(
            folder, shared, parts, data, as_json, against, cast(Test, test), csv, latex, best
        )
        traces = results.collected(_traces(orders, states.values(), trainer, log))
        seconds = time.perf_counter() - started
        note = f"{len(traces)} runs in {seconds:.0f} s, {trainer.workers} jobs at a time"
        by_default = scenario.endswith("-digits") and keep == "all"
        picture, sentences = results.show(
            traces,
            analyse=by_default if analyse is None else analyse,
            note=note if trainer.workers > 1 else "",
        )
        results.say_where(traces, picture, sentences)


def _chosen_runs(
    scenario: str, listed: str, to_set: list[str] | None, settings: dict[str, Any]
) -> dict[str, Config]:
    """The configuration of each method in --methods, by the name of its folder."""
    names = _names(listed)
    own = values_to_set(to_set or [], names)
    configs = [resolve(scenario, name, own[name], **settings) for name in names]
    parts = {config.method_name: config for config in configs}
    distinct = bool(parts) and len(parts) == len(configs)
    require(distinct, "--methods", listed, "one or more different methods, comma-separated")
    return parts


def _best_runs(
    file: Path,
    scenario: str,
    methods: list[str] | None,
    to_set: list[str] | None,
    settings: dict[str, Any],
) -> dict[str, Config]:
    """The configuration of each method with the settings that a search chose, by its folder."""
    search = load_search(file)
    names = None if methods is None else _names(",".join(methods))
    own = values_to_set(to_set or [], names or [of["source"] for of in search.methods.values()])
    given = {"seeds": _SEEDS_OF_BEST, **settings}
    configs = best_configs(search, scenario, names, given, own)
    return {config.method_name: config for config in configs}


def _names(listed: str) -> list[str]:
    """The names in a list of methods."""
    return [name.strip() for name in listed.split(",") if name.strip()]


@contextmanager
def _opened(
    out: str | None,
    shared: str | None,
    name: str,
    parts: Mapping[str, Config],
    *,
    overwrite: bool,
    resume: bool,
) -> Iterator[tuple[Path, Mapping[str, RunStatus]]]:
    """The folder of the results and the state of its runs; of shared storage, a copy here."""
    with local_copy(shared) if shared else nullcontext(Path(out) if out else None) as here:
        if shared and here and not overwrite:
            for part in parts:
                download_state(f"{shared}/{part}", here / part)
        with output_folder(here, name, parts, overwrite=overwrite, resume=resume) as opened:
            yield opened


@final
@dataclass(frozen=True)
class _Results:
    """The results of compared runs: files in a folder, and a table.

    Arguments:
        folder: for the files.
        shared: its address in shared storage, where the files are copied to; None if there is none.
        parts: the configuration of each run, by its method, in the order to show them.
        data: folder with datasets, or None.
        as_json: print JSON for programs, in place of tables and sentences for people.
        against, test: for the tests of the table.
        csv, latex: files for the table, or None.
        best: the search that chose the settings, or None; the folder gets a copy.
    """

    folder: Path
    shared: str | None
    parts: Mapping[str, Config]
    data: Path | None
    as_json: bool
    against: str | None
    test: Test
    csv: Path | None
    latex: Path | None
    best: Path | None

    def collected(self, coming: Iterable[Trace]) -> list[Trace]:
        """All traces; if an error ends them, those before it are shown."""
        traces: list[Trace] = []
        try:
            for trace in coming:
                traces.append(trace)
        except BaseException:
            if traces:
                self.show(traces, analyse=False)
            raise
        return traces

    def show(self, traces: list[Trace], *, analyse: bool, note: str = "") -> tuple[Path, list[str]]:
        """Sort the traces, write the files and print the table.

        Returns:
            the picture, and the report's sentences.
        """
        traces.sort(key=lambda trace: [*self.parts].index(trace.method))
        picture = save(accuracy_matrices(traces), self.folder / "accuracy.png")
        text = json.dumps(self.summaries(traces), indent=1, allow_nan=False)
        _write(self.folder / COMPARISON, text)
        if self.best is not None:
            search = load_search(self.best)
            search.save(self.folder / SEARCH_FILE)
        self._show_table(traces, note)
        try:
            given = _from_files(next(iter(self.parts.values())), self.data)
            sentences = make_report(
                traces, self.folder / PAGE, analyse=analyse, given=given, data=self.data
            )
        finally:
            if self.shared:
                upload(self.folder, self.shared, (picture.name, PAGE, COMPARISON, SEARCH_FILE))
        return picture, sentences

    def _show_table(self, traces: list[Trace], note: str) -> None:
        """Print the table, and write it to files."""
        whole = len(traces) == len(self.parts)  # else an error ended the others
        made = ranking(traces, against=self.against if whole else None, test=self.test)
        if not self.as_json:
            Console().print(comparison_table(made))
            if self.best is not None:
                say(f"Settings: those chosen in {self.best}, on held-out training images.")
            if note:
                say(note)
        if self.csv is not None and whole:
            _write(self.csv, as_csv(made))
        if self.latex is not None and whole:
            _write(self.latex, as_latex(made))

    def say_where(self, traces: list[Trace], picture: Path, sentences: list[str]) -> None:
        """Print where the results are, or the results as JSON."""
        if self.as_json:
            typer.echo(json.dumps(self.summaries(traces), allow_nan=False))
        elif self.shared:
            place = without_password(self.shared)
            say(f"Results, the picture {picture.name} and the report {PAGE} are in {place}")
        else:
            say(f"Results are in {self.folder}; a picture of what was forgotten is {picture}")
            say_report(self.folder / PAGE, sentences)

    def summaries(self, traces: Iterable[Trace]) -> list[dict[str, Any]]:
        """The entries of the runs in `--json`, with the place where others find them."""
        if self.shared is None:
            return [trace.summary() for trace in traces]
        place = without_password(self.shared)
        return [trace.summary() | {"out": f"{place}/{trace.method}"} for trace in traces]


def _write(file: Path, text: str) -> None:
    """Write a text file."""
    write_atomically(file, lambda place: place.write_text(text, "utf-8"))


def _check(
    parts: Mapping[str, Config], settings: dict[str, Any], keep: str, every: float, log: str
) -> None:
    """Reject wrong settings before anything is loaded, made or written."""
    configs = list(parts.values())
    refuse_unused(configs, settings)
    require(0 <= every < math.inf, "--checkpoint-every", every, "a number of minutes, 0 for never")
    KEEPS.check("--keep", keep)
    logger_names(log)
    configs[0].seed_list()


def _orders(
    parts: Mapping[str, Config],
    folder: Path,
    data: Path | None,
    keep: Any,
    every: float,
    states: Mapping[str, RunStatus],
    shared: str | None = None,
) -> list[Order]:
    return [
        Order(
            config.title,
            config,
            folder / part,
            data,
            keep,
            every,
            resume=states[part].kind == "unfinished",
            shared=f"{shared}/{part}" if shared else None,
        )
        for part, config in parts.items()
    ]


def _from_files(config: Config, data: Path | None) -> FromScript:
    """The tasks and the model that a report cannot make again from a trace: those in files."""
    tasks = model = None
    if is_in_file(config.scenario) or is_in_file(config.model):
        tasks = build_scenario(config.scenario, config, data)
        model = ModelFactory(config, tasks.input_shape, tasks.n_outputs)
    return (
        tasks if is_in_file(config.scenario) else None,
        model if is_in_file(config.model) else None,
    )


def _traces(
    orders: Sequence[Order], states: Iterable[RunStatus], engine: Engine, log: str
) -> Iterator[Trace]:
    """The traces of runs, trained where they are not complete.

    The first failure ends the command: at once, or after the other runs if training diverged or
    there are several workers.
    """
    failures: list[ForgetlessError] = []
    missing = []
    for order, state in zip(orders, states, strict=True):
        if state.kind == "complete":
            if order.shared is not None:
                download(order.shared, order.folder)
            yield load_trace(order.folder)
        else:
            missing.append(order)
    with (
        Board(engine.workers, log) as board,
        closing(train(missing, engine, board)) as finished,
    ):
        for order, error in finished:
            if error is None:
                yield load_trace(order.folder)
            elif len(orders) > 1 and isinstance(error, TrainingError):
                failures.append(TrainingError(f"{order.name}: {error}"))
            elif engine.workers == 1:
                raise error
            else:
                failures.append(error)
    if failures:
        raise failures[0]
