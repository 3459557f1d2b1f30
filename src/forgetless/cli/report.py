"""The command `forgetless report`: runs as a page to look at."""

import shlex
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forgetless.report.analysis import Analysis, analysed, known_analysis
from forgetless.report.comparison import Comparison, Entry, compare, find_traces
from forgetless.report.page import headline, write_page
from forgetless.support.errors import ForgetlessError, TraceError
from forgetless.trace import Trace

PAGE = "report.html"


def report_command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="Folders of runs, or folders of those.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The page.  [default: report.html in the first folder]"),
    ] = None,
    analyse: Annotated[
        bool,
        typer.Option("--analyse", help="Find out why, from the weights; kept for the next time."),
    ] = False,
    data: Annotated[Path | None, typer.Option("--data", help="Folder with datasets.")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Make one HTML page of runs: what was forgotten and when, why, and what to do about it.

    The page is a single file that opens without a network.
    """
    traces = find_traces(folders)
    words = ["forgetless", "report", *map(str, folders)] + (["--analyse"] if analyse else [])
    page = out if out is not None else folders[0] / PAGE
    if page.is_dir():
        raise TraceError(f"--out {page} must be a file, and is a folder")
    sentences = make_report(traces, page, analyse=analyse, data=data, command=shlex.join(words))
    say_page(page, sentences)
    if open_it:
        webbrowser.open(page.resolve().as_uri())


def make_report(
    traces: Sequence[Trace],
    page: Path,
    *,
    analyse: bool = False,
    data: Path | None = None,
    command: str = "",
) -> list[str]:
    """Write the page of some runs; gives what it says in words, and what could not be analysed."""
    comparisons = compare(traces)
    console = Console(stderr=True)
    failures: list[str] = []
    with console.status("report") as status:
        analyses = []
        for comparison in comparisons:
            found: dict[str, Analysis] = {}
            for entry in comparison.entries:
                if analyse:
                    status.update(f"why did {entry.label} forget?")
                known = _reasons(entry, analyse, data, failures)
                if known is not None:
                    found[entry.label] = known
            analyses.append(found)
        write_page(comparisons, page, analyses, command=command)
    return [*_sentences(comparisons), *failures]


def say_page(page: Path, sentences: Sequence[str] = ()) -> None:
    """Tell what the page says, and where it is, on a line of its own."""
    for line in (*sentences, f"The report is {page}"):
        Console().print(line, soft_wrap=True, markup=False, highlight=False)


def _reasons(
    entry: Entry, analyse: bool, data: Path | None, failures: list[str]
) -> Analysis | None:
    """The analysis of the first part of an entry that has one, or can have one."""
    for part in entry.parts:
        known = known_analysis(part)
        if known is not None:
            return known
    if not analyse:
        return None
    try:
        return analysed(entry.parts[0], data=data)
    except ForgetlessError as error:
        failures.append(f"{entry.label} could not be analysed: {error}")
        return None


def _sentences(comparisons: Sequence[Comparison]) -> list[str]:
    if len(comparisons) == 1:
        return [headline(comparisons[0])]
    return [f"{c.scenario}: {headline(c)}" for c in comparisons]
