"""The commands: run, compare, list, data; forecast and report have files of their own."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from forgetless.atomic import write_atomically
from forgetless.cli.forecast import forecast_command
from forgetless.cli.options import with_config_options
from forgetless.cli.paper import paper_app
from forgetless.cli.progress import LOGGERS, logger_names, watched
from forgetless.cli.report import PAGE, make_report, report_command, say_page
from forgetless.config import Config, resolve
from forgetless.data import SCENARIOS
from forgetless.data.sources import fetch, status
from forgetless.errors import require
from forgetless.methods import METHODS, build_method
from forgetless.models import MODELS
from forgetless.plots import accuracy_matrices, save
from forgetless.report import comparison_table, task_table
from forgetless.runs import COMPARISON, output_folder, run, standing
from forgetless.trace import Trace, load_trace
from forgetless.version import __version__

app = typer.Typer(
    help="Train networks on one task after another and see what they forget.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # one column of options reads better than a frame of four
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Show which datasets are on disk, or fetch one.")
app.add_typer(data_app, name="data")
app.add_typer(paper_app, name="paper")

Scenario = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="What is learned; `forgetless list` shows all.")
]
DataFolder = Annotated[
    Path | None,
    typer.Option("--data", help="Folder with datasets; else FORGETLESS_DATA, then the cache."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for the results; by default a new one in runs/."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the results of an earlier run in --out.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with the run in --out, as the same command does by itself, and show the "
        "results of one that is complete.",
    ),
]
CheckpointEvery = Annotated[
    float,
    typer.Option(
        "--checkpoint-every",
        metavar="MINUTES",
        help="Save all that is needed to go on this often within a task, and after each; 0: never.",
    ),
]
Kept = Annotated[
    str,
    typer.Option(
        "--keep",
        metavar="all|weights|nothing",
        help="What the trace keeps: weights and the method's memory, weights only, or neither.",
    ),
]
Analyse = Annotated[
    bool | None,
    typer.Option(
        "--analyse/--no-analyse",
        help="Find out why, for the report. [default: on digits, where it takes seconds]",
        show_default=False,
    ),
]
Log = Annotated[
    str,
    typer.Option(
        "--log",
        metavar="NAMES",
        help=f"Log accuracies as well to {', '.join(LOGGERS)} (comma-separated).",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else.")
]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("run")
@with_config_options
def run_command(
    scenario: Scenario,
    method: Annotated[str, typer.Option("--method", help="What is done against forgetting.")],
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
    """Learn the tasks of SCENARIO with one method and show what was forgotten."""
    config = resolve(scenario, method, **settings)
    _check(config, keep, checkpoint_every, log)
    parts = {".": config}
    name = f"{scenario}-{method}"
    with output_folder(out, name, parts, overwrite=overwrite, resume=resume) as folder:
        trace = _train(config, folder, data, overwrite, keep, checkpoint_every, log)
        picture = _save_picture([trace], folder)
        make_report([trace], folder / PAGE)
    if as_json:
        typer.echo(json.dumps(trace.summary(), allow_nan=False))
        return
    console = Console()
    console.print(task_table(trace))
    console.print(comparison_table([trace]))
    _say_where(folder, picture)
    say_page(folder / PAGE)


@app.command("compare")
@with_config_options
def compare_command(
    scenario: Scenario,
    methods: Annotated[
        str, typer.Option("--methods", help="Several methods, comma-separated.")
    ] = "sgd,ewc,a-gem,ogd,pca-ogd",
    data: DataFolder = None,
    out: Out = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    checkpoint_every: CheckpointEvery = 5.0,
    keep: Kept = "all",
    analyse: Analyse = None,
    log: Log = "",
    as_json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Learn the tasks of SCENARIO with several methods and put the results side by side."""
    names = [name.strip() for name in methods.split(",") if name.strip()]
    distinct = bool(names) and len(set(names)) == len(names)
    require(distinct, "--methods", methods, "one or more different methods, comma-separated")
    configs = [resolve(scenario, name, **settings) for name in names]
    for config in configs:
        _check(config, keep, checkpoint_every, log)
    traces: list[Trace] = []
    parts = {config.method: config for config in configs}
    name = f"{scenario}-compare"
    with output_folder(out, name, parts, overwrite=overwrite, resume=resume) as folder:
        try:
            for config in configs:
                place = folder / config.method
                traces.append(_train(config, place, data, overwrite, keep, checkpoint_every, log))
        finally:
            if traces:  # what was finished is kept, whatever stopped the rest
                picture = _save_picture(traces, folder)
                make_report(traces, folder / PAGE)
                text = json.dumps([t.summary() for t in traces], indent=1, allow_nan=False)
                write_atomically(folder / COMPARISON, lambda file: file.write_text(text, "utf-8"))
                if not as_json:
                    Console().print(comparison_table(traces))
    if as_json:
        typer.echo(json.dumps([t.summary() for t in traces], allow_nan=False))
        return
    wanted = scenario.endswith("-digits") and keep == "all" if analyse is None else analyse
    sentences = make_report(traces, folder / PAGE, analyse=wanted, data=data)
    _say_where(folder, picture)
    say_page(folder / PAGE, sentences)


@app.command("list")
def list_command() -> None:
    """Show the scenarios, methods and models by name."""
    console = Console()
    groups = {
        "scenarios": SCENARIOS,
        "methods": {name: what for name, (what, _) in METHODS.items()},
        "models": {name: what for name, (what, _) in MODELS.items()},
    }
    for title, entries in groups.items():
        console.print(f"[bold]{title}[/bold]")
        for name, what in entries.items():
            console.print(f"  {name:<24}{what}", highlight=False)


app.command("forecast")(forecast_command)
app.command("report")(report_command)


@data_app.callback(invoke_without_command=True)
def data_command(context: typer.Context, data: DataFolder = None) -> None:
    """Show which datasets are on disk."""
    context.obj = data
    if context.invoked_subcommand is not None:
        return
    table = Table("dataset", "on disk", "where", "what it is")
    for source in status(data):
        size = f"{source.bytes / 1e6:.0f} MB" if source.bytes else "yes"
        on_disk = size if source.available else "no"
        table.add_row(source.name, on_disk, source.where, source.description)
    Console().print(table)


@data_app.command("fetch")
def fetch_command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The dataset.")],
    data: DataFolder = None,
) -> None:
    """Make sure that a dataset is on disk and intact; download it if it is not."""
    where = fetch(name, data or context.obj)
    typer.echo(f"{name} is in {where}")


def _check(config: Config, keep: str, every: float, log: str) -> None:
    """Find what is wrong with the settings before anything is loaded, made or written."""
    require(0 <= every < math.inf, "--checkpoint-every", every, "a number of minutes, 0 for never")
    require(keep in ("all", "weights", "nothing"), "--keep", keep, "all, weights or nothing")
    logger_names(log)
    config.seed_list()
    build_method(config.method, config)


def _train(
    config: Config,
    folder: Path,
    data: Path | None,
    overwrite: bool,
    keep: Any,
    every: float,
    log: str,
) -> Trace:
    if not overwrite and standing(folder, config) == "complete":
        return load_trace(folder)
    with watched(f"{config.scenario} {config.method}", log, folder, config.as_dict()) as observer:
        return run(
            config,
            data=data,
            out=folder,
            overwrite=overwrite,
            keep=keep,
            checkpoint_every=every,
            observer=observer,
        )


def _save_picture(traces: list[Trace], folder: Path) -> Path:
    return save(accuracy_matrices(traces), folder / "accuracy.png")


def _say_where(folder: Path, picture: Path) -> None:
    words = f"Results are in {folder}; a picture of what was forgotten is {picture}"
    Console().print(words, soft_wrap=True, markup=False, highlight=False)
