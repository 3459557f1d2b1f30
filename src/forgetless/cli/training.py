"""The commands `forgetless run` and `forgetless compare`."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from forgetless.cli.arguments import (
    Analyse,
    CheckpointEvery,
    DataFolder,
    Json,
    Kept,
    Log,
    Out,
    OutPlace,
    Overwrite,
    Resume,
    Scenario,
)
from forgetless.cli.board import say
from forgetless.cli.engine import Address, EngineName, Jobs, engine_for
from forgetless.cli.options import with_config_options
from forgetless.cli.progress import logger_names
from forgetless.cli.report import PAGE, make_report, say_page
from forgetless.cli.views import view_of
from forgetless.launch.config import Config, refuse_unused, resolve
from forgetless.launch.engines import (
    Engine,
    InProcess,
    Order,
    brought_here,
    collect,
    is_shared,
    pull,
    put_files,
    shown,
    train,
)
from forgetless.launch.runs import COMPARISON, check_names, output_folder, standing
from forgetless.report import comparison_table, task_table
from forgetless.report.plots import accuracy_matrices, save
from forgetless.support.errors import ForgetlessError, require
from forgetless.support.files import write_atomically
from forgetless.trace import Trace, load_trace


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
    refuse_unused([config], settings)
    _check(config, keep, checkpoint_every, log)
    parts = {".": config}
    name = f"{scenario}-{method}"
    with output_folder(out, name, parts, overwrite=overwrite, resume=resume) as folder:
        order = _order(config, folder, data, keep, checkpoint_every, overwrite)
        (trace,) = _traces([order], InProcess(), log)
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


@with_config_options
def compare_command(
    scenario: Scenario,
    methods: Annotated[
        str, typer.Option("--methods", help="Several methods, comma-separated.")
    ] = "sgd,ewc,a-gem,ogd,pca-ogd",
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
    as_json: Json = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Learn the tasks of SCENARIO with several methods and put the results side by side."""
    names = [name.strip() for name in methods.split(",") if name.strip()]
    distinct = bool(names) and len(set(names)) == len(names)
    require(distinct, "--methods", methods, "one or more different methods, comma-separated")
    configs = [resolve(scenario, name, **settings) for name in names]
    refuse_unused(configs, settings)
    for config in configs:
        _check(config, keep, checkpoint_every, log)
    started = time.perf_counter()
    traces: list[Trace] = []
    parts = {config.method: config for config in configs}
    shared = out if out is not None and is_shared(out) else None
    with ExitStack() as stack:
        where = stack.enter_context(brought_here(shared)) if shared else Path(out) if out else None
        at = where or Path()
        orders = {
            part: _order(config, at / part, data, keep, checkpoint_every, overwrite, shared)
            for part, config in parts.items()
        }
        if shared and not overwrite:
            for order in orders.values():
                pull(order)
        name = f"{scenario}-compare"
        options = {"overwrite": overwrite, "resume": resume}
        folder = stack.enter_context(output_folder(where, name, parts, **options))
        chosen = stack.enter_context(engine_for(engine, address, jobs))
        runs = [replace(order, folder=folder / part) for part, order in orders.items()]
        if engine == "local":  # elsewhere the data may be where the workers are
            done = [not overwrite and standing(r.folder, r.config) == "complete" for r in runs]
            coming = [r.config for r, is_done in zip(runs, done, strict=True) if not is_done]
            check_names(coming, data)
        try:
            for trace in _traces(runs, chosen, log):
                traces.append(trace)
        finally:
            if traces:  # what was finished is kept, whatever stopped the rest
                traces.sort(key=lambda trace: names.index(trace.method))
                picture = _save_picture(traces, folder)
                make_report(traces, folder / PAGE)
                summaries = [_summary(trace, shared) for trace in traces]
                text = json.dumps(summaries, indent=1, allow_nan=False)
                write_atomically(folder / COMPARISON, lambda file: file.write_text(text, "utf-8"))
                if shared:
                    put_files(folder, shared, (picture.name, PAGE, COMPARISON))
                if not as_json:
                    Console().print(comparison_table(traces))
        if chosen.workers > 1 and not as_json:
            seconds = time.perf_counter() - started
            say(f"{len(traces)} runs in {seconds:.0f} s, {chosen.workers} jobs at a time")
        wanted = scenario.endswith("-digits") and keep == "all" if analyse is None else analyse
        sentences = make_report(traces, folder / PAGE, analyse=wanted, data=data)
        if shared:
            put_files(folder, shared, (PAGE,))
        if as_json:
            typer.echo(json.dumps(summaries, allow_nan=False))
            return
        if shared:
            say(f"Results, the picture {picture.name} and the report {PAGE} are in {shown(shared)}")
            return
    _say_where(folder, picture)
    say_page(folder / PAGE, sentences)


def _check(config: Config, keep: str, every: float, log: str) -> None:
    """Find what is wrong with the settings before anything is loaded, made or written."""
    require(0 <= every < math.inf, "--checkpoint-every", every, "a number of minutes, 0 for never")
    require(keep in ("all", "weights", "nothing"), "--keep", keep, "all, weights or nothing")
    logger_names(log)
    config.seed_list()
    config.build_method()


def _order(
    config: Config,
    folder: Path,
    data: Path | None,
    keep: Any,
    every: float,
    overwrite: bool,
    shared: str | None = None,
) -> Order:
    name = f"{config.scenario} {config.method}"
    storage = f"{shared.rstrip('/')}/{config.method}" if shared else None
    return Order(name, config, folder, data, keep, every, fresh=overwrite, storage=storage)


def _summary(trace: Trace, shared: str | None) -> dict[str, Any]:
    """What `--json` says of a run, with the place where others find it."""
    out = {"out": f"{shown(shared)}/{trace.method}"} if shared else {}
    return trace.summary() | out


def _traces(orders: Sequence[Order], engine: Engine, log: str) -> Iterator[Trace]:
    """The runs, trained where they are not complete.

    One that breaks ends the command: at once, or where several go on at a time after the others.
    """
    failures: list[ForgetlessError] = []
    missing = []
    for order in orders:
        if not order.fresh and standing(order.folder, order.config) == "complete":
            if order.storage is not None:
                collect(order)
            yield load_trace(order.folder)
        else:
            missing.append(order)
    with view_of(engine, log) as view, closing(train(missing, engine, view)) as finished:
        for order, error in finished:
            if error is None:
                yield load_trace(order.folder)
            elif engine.workers == 1:
                raise error
            else:
                failures.append(error)
    if failures:
        raise failures[0]


def _save_picture(traces: list[Trace], folder: Path) -> Path:
    return save(accuracy_matrices(traces), folder / "accuracy.png")


def _say_where(folder: Path, picture: Path) -> None:
    say(f"Results are in {folder}; a picture of what was forgotten is {picture}")
