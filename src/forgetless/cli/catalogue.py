"""The commands `forgetless list` and `forgetless data`: scenarios, methods, models, datasets."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from forgetless.cli.arguments import DataFolder
from forgetless.data import SCENARIOS
from forgetless.data.sources import fetch, status
from forgetless.methods import METHODS
from forgetless.training.models import MODELS

data_app = typer.Typer(
    help="Show which datasets are on disk, or fetch one.",
    add_completion=False,
    rich_markup_mode=None,
)


def list_command() -> None:
    """Show the scenarios, methods and models by name."""
    console = Console()
    groups = {
        "scenarios": SCENARIOS,
        "methods": {name: method.summary for name, method in METHODS.items()},
        "models": {name: what for name, (what, _) in MODELS.items()},
    }
    for title, entries in groups.items():
        console.print(f"[bold]{title}[/bold]")
        for name, what in entries.items():
            console.print(f"  {name:<24}{what}", highlight=False)


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
