"""The command `forgetless report`: an HTML page of runs."""

import shlex
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from forgetless.cli.options import DataFolder, Script
from forgetless.cli.progress import say_report
from forgetless.launch.rebuild import load_from_script
from forgetless.report.comparison import find_traces, run_folder
from forgetless.report.page import PAGE, make_report
from forgetless.support.validation import TraceError


def report_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="Folders of runs, or their parents.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The page.  [default: report.html in the first folder]"),
    ] = None,
    analyse: Annotated[
        bool,
        typer.Option(
            "--analyse", help="Analyse from the weights why tasks were forgotten; cached in DIR."
        ),
    ] = False,
    script: Script = "",
    data: DataFolder = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write an HTML report of runs: what was forgotten and when, why, and what to do about it.

    The page is a single file that opens without a network.
    """
    traces, broken = find_traces(folders)
    words = ["forgetless", "report", *map(str, folders)] + (["--analyse"] if analyse else [])
    if script:  # analysed too: there is no other use for it
        words += ["--from", script]
    page = out if out is not None else run_folder(folders[0]) / PAGE
    if page.is_dir():
        raise TraceError(f"--out {page} must be a file, and is a folder")
    given = load_from_script(script) if script else (None, None)
    sentences = make_report(
        traces,
        page,
        analyse=analyse or bool(script),
        given=given,
        data=data,
        command=shlex.join(words),
        broken=broken,
    )
    say_report(page, sentences)
    if open_it:
        webbrowser.open(page.resolve().as_uri())
