"""The commands `forgetless list` and `forgetless data`: scenarios, methods, models, datasets."""

from collections.abc import Mapping
from dataclasses import MISSING
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from forgetless.cli.groups import Group, completing
from forgetless.cli.options import DataFolder, method_names
from forgetless.cli.progress import say
from forgetless.data import SCENARIOS
from forgetless.data.datasets import SOURCES, fetch, status
from forgetless.methods import METHODS, method_class, method_options
from forgetless.support.plugins import PluginKind, installed, plugin
from forgetless.support.validation import ConfigError
from forgetless.training.models import MODELS

data_app = typer.Typer(
    cls=Group,
    help="Show which datasets are on disk, or fetch one.",
    add_completion=False,
    rich_markup_mode=None,
)


def list_command(
    method: Annotated[
        str | None,
        typer.Argument(
            metavar="[METHOD]",
            help="A method whose options to show instead.",
            autocompletion=completing(method_names),
        ),
    ] = None,
) -> None:
    """Show the scenarios, methods and models, built-in and installed ones."""
    if method is not None:
        _show_options(method)
        return
    _show_group("scenario", SCENARIOS)
    _show_group("method", {name: kind.summary for name, kind in METHODS.items()})
    _show_group("model", {name: what for name, (what, _) in MODELS.items()})


def _show_group(kind: PluginKind, builtin: Mapping[str, str]) -> None:
    entries = dict(builtin)
    for name in sorted(installed(kind).keys() - builtin.keys()):
        try:
            found = method_class(name) if kind == "method" else plugin(kind, name, builtin)
            entries[name] = _summary(found)
        except ConfigError as error:
            entries[name] = f"cannot be used: {error}"
    Console().print(f"[bold]{kind}s[/bold]")
    for name, what in entries.items():
        say(f"  {name:<24}{what}")


def _summary(found: Any) -> str:
    """A line about a plug-in: its `summary`, or the first line of its docstring."""
    return str(getattr(found, "summary", "") or (found.__doc__ or "").strip().partition("\n")[0])


def _show_options(name: str) -> None:
    """The options of a method, as --set takes them."""
    kind = method_class(name)
    say(f"{kind.name}: {_summary(kind)}")
    for setting, field in method_options(name).items():
        default = "required" if field.default is MISSING else f"default: {field.default}"
        choices = " or ".join(field.metadata.get("choices", ()))
        tried = ", ".join(f"{value:g}" for value in field.metadata.get("search", ()))
        parts = (
            field.metadata.get("help", ""),
            choices and f"{choices}.",
            tried and f"tune tries {tried}.",
        )
        text = " ".join(filter(None, parts))
        say(f"  --set {setting}=…".ljust(32) + f"{text} [{default}]".lstrip())


@data_app.callback(invoke_without_command=True)
def data_command(context: typer.Context, data: DataFolder = None) -> None:
    """Show which datasets are on disk."""
    context.obj = data
    if context.invoked_subcommand is not None:
        return
    table = Table("dataset", "on disk", "where", "contents")
    for source in status(data):
        size = f"{source.bytes / 1e6:.0f} MB" if source.bytes else "yes"
        on_disk = size if source.available else "no"
        table.add_row(source.name, on_disk, source.where, source.description)
    Console().print(table)


@data_app.command("fetch")
def fetch_command(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="The dataset.", autocompletion=completing(lambda: SOURCES))
    ],
    data: DataFolder = None,
) -> None:
    """Check that a dataset is on disk and intact; download it if it is not."""
    where = fetch(name, data or context.obj)
    typer.echo(f"{name} is in {where}")
