"""The options that say where runs are trained."""

from typing import Annotated

import typer

from forgetless.engines import Engine, InProcess, Processes
from forgetless.errors import require

ENGINES = ("local",)

EngineName = Annotated[
    str,
    typer.Option("--engine", metavar="|".join(ENGINES), help="Where runs are trained."),
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        metavar="N",
        help="How many runs, or groups of a run's seeds, are trained at a time, each in a process "
        "of its own with its part of the processor's threads.",
    ),
]


def engine_for(name: str, jobs: int) -> Engine:
    """The engine that the options ask for."""
    require(name in ENGINES, "--engine", name, " or ".join(ENGINES))
    require(jobs >= 1, "--jobs", jobs, "a number of jobs at a time, at least 1")
    return InProcess() if jobs == 1 else Processes(jobs)
