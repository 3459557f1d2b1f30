"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from forgetless.cli.progress import LOGGERS

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
OutPlace = Annotated[
    str | None,
    typer.Option(
        "--out",
        help="Folder for the results, or a shared one such as s3://…; by default a new one in "
        "runs/.",
    ),
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
