"""Command-line options made from the fields of the configuration."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from forgetless.launch.config import Config, describe_default
from forgetless.support.options import flag

_METAVARS = {int: "N", float: "X", float | None: "X", str: "TEXT"}
_NAMED = {"memory": "N|SIZE|auto", "budget": "SIZE|auto"}
_TEXTS = {"memory": str}  # a count, or the size of all: the configuration tells which
_ARGUMENTS = ("scenario", "method")  # said in another way than as an option with a default


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for every field of the configuration.

    The command's own parameters come first; it receives the options that were given, by field
    name, as `settings`. An option that was not given is left to the scenario's preset.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
    hints = get_type_hints(Config)
    hints |= _TEXTS
    options = [
        _parameter(f.name, hints[f.name], f.metadata)
        for f in fields(Config)
        if f.name not in _ARGUMENTS
    ]
    names = [p.name for p in options]

    def wrapper(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in names}
        settings = {name: value for name, value in given.items() if value is not None}
        command(**arguments, settings=settings)

    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in own + options}
    return wrapper


def _parameter(name: str, kind: Any, metadata: Any) -> inspect.Parameter:
    choices = metadata["choices"]
    shown = flag(name)
    info = typer.Option(
        f"{shown}/--no-{shown[2:]}" if kind is bool else shown,
        help=f"{metadata['help']} [default: {describe_default(name)}]",
        metavar="|".join(choices) or _NAMED.get(name) or _METAVARS.get(kind),
        show_default=False,  # the parser's default is None: not given
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )
