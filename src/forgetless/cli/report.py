"""The command `forgetless report`: an HTML page of runs."""

import shlex
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forgetless.cli.options import DataFolder, Script
from forgetless.cli.progress import say
from forgetless.launch.rebuild import FromScript, load_from_script
from forgetless.report.analysis import Analysis, cached_analysis, known_analysis
from forgetless.report.comparison import Entry, compare, find_traces, run_folder
from forgetless.report.page import headline, write_page
from forgetless.support.errors import ForgetlessError, TraceError
from forgetless.trace import Trace

PAGE = "report.html"


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


def make_report(
    traces: Sequence[Trace],
    page: Path,
    *,
    analyse: bool = False,
    given: FromScript = (None, None),
    data: Path | None = None,
    command: str = "",
    broken: Sequence[str] = (),
) -> list[str]:
    """Write the page of some runs, even if an analysis is interrupted.

    Arguments:
        given: tasks and model of the runs that a script made.

    Returns:
        its headlines, and a sentence for each run that could not be analysed or read.
    """
    comparisons = compare(traces)
    failures: list[str] = []
    analyses: list[dict[str, Analysis]] = [{} for _ in comparisons]
    try:
        with Console(stderr=True).status("report") as status:
            for comparison, found in zip(comparisons, analyses, strict=True):
                for entry in comparison.entries:
                    if analyse:
                        status.update(f"why did {entry.label} forget?")
                    known = _analysis(entry, analyse, given, data, failures)
                    if known is not None:
                        found[entry.label] = known
    finally:
        write_page(comparisons, page, analyses, command=command, broken=broken)
    one = len(comparisons) == 1
    headlines = [headline(c) if one else f"{c.title}: {headline(c)}" for c in comparisons]
    return [*headlines, *failures, *(f"Left out: {sentence}" for sentence in broken)]


def say_report(page: Path, sentences: Sequence[str] = ()) -> None:
    """Print the headlines of a page, and where it is."""
    for line in (*sentences, f"The report is {page}"):
        say(line)


def _analysis(
    entry: Entry, analyse: bool, given: FromScript, data: Path | None, failures: list[str]
) -> Analysis | None:
    """The analysis of the first trace of an entry that has one, or else a new one if asked."""
    for part in entry.parts:
        known = known_analysis(part)
        if known is not None:
            return known
    if not analyse:
        return None
    trace = entry.parts[0]
    tasks = given[0] if "scenario_from" in trace.config else None
    model = given[1] if "model_from" in trace.config else None
    try:
        return cached_analysis(trace, tasks=tasks, model=model, data=data)
    except ForgetlessError as error:
        failures.append(f"{entry.label} could not be analysed: {error}")
        return None
