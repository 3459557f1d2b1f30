"""The command `forgetless paper`: rebuild the paper's evidence, and say what holds."""

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from forgetless.cli.board import Board, say
from forgetless.cli.engine import Address, EngineName, Jobs, engine_for
from forgetless.launch.config import resolve
from forgetless.launch.engines import brought_here, is_shared
from forgetless.paper import ARTEFACTS, Plan, Stage, build, chosen, scale_named, write_page

paper_app = typer.Typer(
    help="Rebuild the tables, figures and verdicts of the paper that forgetless implements.",
    add_completion=False,
    rich_markup_mode=None,
)

ScaleName = Annotated[
    str,
    typer.Option(
        "--scale",
        metavar="full|small",
        help="The paper's own size, for a GPU; or small, on digits in minutes.",
    ),
]
Runs = Annotated[
    str | None,
    typer.Option(
        "--runs",
        help="Folder of trained runs, used again, or a shared one such as s3://…  "
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
    """Show what can be built."""
    table = Table("name", "what it is", "in the paper")
    for name, artefact in ARTEFACTS.items():
        table.add_row(name, artefact.title, artefact.place)
    Console().print(table)


@paper_app.command("build")
def build_command(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME…|all", help="`forgetless paper list` shows them.")
    ],
    scale: ScaleName = "full",
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help="How many, or which.  [default: 5; small: 2]"),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, …")] = "auto",
    runs: Runs = None,
    results: Results = None,
    page: PageFile = None,
    data: Annotated[Path | None, typer.Option("--data", help="Folder with datasets.")] = None,
    train: Annotated[
        bool,
        typer.Option(
            "--train/--no-train",
            help="Train what is missing, or leave out benchmarks and cells whose runs are missing.",
        ),
    ] = True,
    engine: EngineName = "local",
    address: Address = None,
    jobs: Jobs = 1,
) -> None:
    """Train what is missing, measure, and rebuild the page.

    Run again after an interruption, it goes on where it was: finished runs are used again, and
    unfinished ones go on from their checkpoints.
    """
    size = scale_named(scale)
    if seeds is not None:
        resolve("rotated-digits", "sgd", seeds=seeds).seed_list()
        size = replace(size, seeds=seeds)
    where, file = _places(scale, results, page)
    artefacts = chosen(names)
    started = time.perf_counter()
    shared = runs if runs is not None and is_shared(runs) else None
    with (
        brought_here(shared) if shared else nullcontext(Path(runs or "runs/paper")) as folder,
        engine_for(engine, address, jobs) as place,
        _Bar(together=place.workers > 1) as bar,
    ):
        plan = Plan(size, folder, where, data, device, train, place, shared)
        build(artefacts, plan, bar)
        at_a_time = "one job" if place.workers == 1 else f"{place.workers} jobs"
    say(f"Built in {time.perf_counter() - started:.0f} s, {at_a_time} at a time")
    _write(where, file)


@paper_app.command("page")
def page_command(scale: ScaleName = "full", results: Results = None, page: PageFile = None) -> None:
    """Rebuild the page and its figures from the results, without training."""
    _write(*_places(scale, results, page))


def _places(scale: str, results: Path | None, page: Path | None) -> tuple[Path, Path]:
    """The folder of the results and the page; those of the full scale are never written over."""
    scale_named(scale)
    small = scale == "small"
    return (
        results or (_SMALL / "results" if small else Path("results/paper")),
        page or (_SMALL / "paper.md" if small else Path("docs/paper.md")),
    )


def _write(results: Path, page: Path) -> None:
    write_page(results, page, page.parent / "images" / "paper")
    say(f"The page is {page}")


@final
class _Bar:
    """Where a build is and how long it will take; on a terminal a bar, else a line a run.

    Arguments:
        together: whether several jobs go on at a time, which then have a board.
    """

    def __init__(self, *, together: bool) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            BarColumn(bar_width=12),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._bar = self._bars.add_task("", total=1.0)
        self._started = time.perf_counter()
        self._board = Board(self._console) if together else None

    def __enter__(self) -> "_Bar":
        (self._board or self._bars).start()
        return self

    def __exit__(self, *error: object) -> None:
        (self._board or self._bars).stop()

    def __call__(self, stage: Stage) -> None:
        """Show a stage."""
        if self._board is not None and stage.event is not None:
            self._board(stage.event)
            return
        if self._board is not None:
            self._board.say(stage.what)
            return
        if stage.done == 0:
            self._started = time.perf_counter()
            self._bars.reset(self._bar)
        total = max(stage.total, 1.0)
        self._bars.update(self._bar, description=stage.what, completed=stage.done, total=total)
        if stage.fresh and not self._console.is_terminal:
            self._console.print(self._line(stage), soft_wrap=True, markup=False, highlight=False)

    def _line(self, stage: Stage) -> str:
        spent = time.perf_counter() - self._started
        if not 0 < stage.done < stage.total:
            return stage.what
        left = spent * (stage.total - stage.done) / stage.done
        return f"{stage.what}; {spent:.0f} s so far, about {left:.0f} s left"
