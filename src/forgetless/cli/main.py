"""The command's groups and options; each subcommand is imported only when it is used."""

from importlib import import_module
from typing import Annotated, Any, final

import typer
from typer.core import TyperGroup

from forgetless.support.version import __version__

# Name → module, attribute (a function or a Typer application) and its line in the help.
_COMMANDS = {
    "list": ("catalogue", "list_command", "Show the scenarios, methods and models by name."),
    "run": (
        "training",
        "run_command",
        "Learn the tasks of SCENARIO with one method and show what was forgotten.",
    ),
    "compare": (
        "training",
        "compare_command",
        "Learn the tasks of SCENARIO with several methods and compare the results.",
    ),
    "forecast": (
        "forecast",
        "forecast_command",
        "Predict what learning the next task will do to a known one.",
    ),
    "report": (
        "report",
        "report_command",
        "Make an HTML page of runs: what was forgotten, when and why.",
    ),
    "data": ("catalogue", "data_app", "Show which datasets are on disk, or fetch one."),
    "paper": ("paper", "paper_app", "Rebuild the paper's tables, figures and verdicts."),
}


@final
class LazyGroup(TyperGroup):
    """A group that knows its commands by name and help line, and imports one when it is used.

    The commands need torch, which takes seconds to import; `--help` and `--version` do not.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        target = getattr(import_module(f"forgetless.cli.{module}"), attribute)
        if not isinstance(target, typer.Typer):
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            single.command(cmd_name)(target)
            target = single
        command = typer.main.get_command(target)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in _COMMANDS.items()])


app = typer.Typer(
    cls=LazyGroup,
    help="Train networks on one task after another and see what they forget.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # one column of options reads better than a frame of four
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
