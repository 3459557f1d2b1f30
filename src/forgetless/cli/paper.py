"""The command `forgetless paper`: rebuild the paper's tables, figures and verdicts."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from forgetless.cli.groups import Group, completing
from forgetless.cli.options import Address, DataFolder, EngineName, Jobs, engine_for
from forgetless.cli.progress import Board, say
from forgetless.launch.engines import local_copy
from forgetless.launch.runs import resolve
from forgetless.paper import ARTEFACTS, Plan, Stage, build, chosen, scale_named, write_page
from forgetless.support.files import is_shared

paper_app = typer.Typer(
    cls=Group,
    help="Rebuild the tables, figures and verdicts of the paper that forgetless implements.",
    add_completion=False,
    rich_markup_mode=None,
)

ScaleName = Annotated[
    str,
    typer.Option(
        "--scale",
        metavar="full|small",
        help="The paper's own size, for a GPU; or small: digits, in minutes.",
    ),
]
Runs = Annotated[
    str | None,
    typer.Option(
        "--runs",
        help="Folder of trained runs to reuse, or shared storage such as s3://…  "
        "[default: runs/paper]",
    ),
]
Results = Annotated[
    Path | None,
    typer.Option(
        "--results",
        help="Folder of the results.  [default: results/paper; small: runs/paper-small/results]",
    ),
]
PageFile = Annotated[
    Path | None,
    typer.Option(
        "--page", help="The page.  [default: docs/paper.md; small: runs/paper-small/paper.md]"
    ),
]

_SMALL = Path("runs/paper-small")


@paper_app.command("list")
def list_command() -> None:
    """Show the tables and figures that can be built."""
    table = Table("name", "content", "in the paper")
    for name, artefact in ARTEFACTS.items():
        table.add_row(name, artefact.title, artefact.place)
    Console().print(table)


@paper_app.command("build")
def build_command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME…|all",
            help="`forgetless paper list` shows them.",
            autocompletion=completing(lambda: ["all", *ARTEFACTS]),
        ),
    ],
    scale: ScaleName = "full",
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help="How many seeds, or which ones.  [default: 5; small: 2]"),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, …")] = "auto",
    runs: Runs = None,
    results: Results = None,
    page: PageFile = None,
    data: DataFolder = None,
    train: Annotated[
        bool,
        typer.Option(
            "--train/--no-train",
            help="Train missing runs, or leave out the benchmarks and cells that need them.",
        ),
    ] = True,
    engine: EngineName = "local",
    address: Address = None,
    jobs: Jobs = 1,
) -> None:
    """Train missing runs, measure, and rebuild the page.

    After an interruption the same command resumes: finished runs are reused, and unfinished ones
    continue from their checkpoints.
    """
    size = scale_named(scale)
    if seeds is not None:
        resolve("rotated-digits", "sgd", seeds=seeds).seed_list()
        size = replace(size, seeds=seeds)
    results_folder, page_file = _places(scale, results, page)
    artefacts = chosen(names)
    started = time.perf_counter()
    shared = runs if runs is not None and is_shared(runs) else None
    with (
        local_copy(shared) if shared else nullcontext(Path(runs or "runs/paper")) as runs_folder,
        engine_for(engine, address, jobs) as trainer,
        _watcher(trainer.workers) as watch,
    ):
        plan = Plan(size, runs_folder, results_folder, data, device, train, trainer, shared)
        build(artefacts, plan, watch)
        at_a_time = "one job" if trainer.workers == 1 else f"{trainer.workers} jobs"
    say(f"Built in {time.perf_counter() - started:.0f} s, {at_a_time} at a time")
    _write(results_folder, page_file)


@paper_app.command("page")
def page_command(scale: ScaleName = "full", results: Results = None, page: PageFile = None) -> None:
    """Rebuild the page and its figures from the results, without training."""
    _write(*_places(scale, results, page))


def _places(scale: str, results: Path | None, page: Path | None) -> tuple[Path, Path]:
    """The folder of the results and the page; a small build has its own."""
    scale_named(scale)
    small = scale == "small"
    return (
        results or (_SMALL / "results" if small else Path("results/paper")),
        page or (_SMALL / "paper.md" if small else Path("docs/paper.md")),
    )


def _write(results: Path, page: Path) -> None:
    write_page(results, page, page.parent / "images" / "paper")
    say(f"The page is {page}")


@contextmanager
def _watcher(workers: int) -> Iterator[Callable[[Stage], None]]:
    """Show the stages of a build: with several workers their jobs, else how far the build is."""
    with Board(workers) as board:

        def watch(stage: Stage) -> None:
            if workers == 1:
                share = stage.done / max(stage.total, 1.0)
                board.show_stage(stage.what, share, new=stage.fresh)
            elif stage.event is not None:
                board(stage.event)
            else:
                board.show_stage(stage.what)

        yield watch
