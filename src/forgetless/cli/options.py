"""Command-line options made from the fields of the configuration and of the methods."""

import inspect
from collections.abc import Callable
from dataclasses import Field
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from forgetless.launch.config import Config, describe_default, setting_fields
from forgetless.methods import METHODS
from forgetless.support.options import flag

_METAVARS = {int: "N", float: "X", str: "TEXT"}
_NAMED = {"budget": "SIZE|auto"}
_ARGUMENTS = ("scenario", "method")  # given in another way than as an option with a default


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for every setting of a run.

    The command's own parameters come first; it receives the options that were given, by name, as
    `settings`. An option that was not given is left to the scenario's preset.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
    options = [
        _parameter(name, of) for name, of in setting_fields().items() if name not in _ARGUMENTS
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


def _parameter(name: str, of: dict[str, Field[Any]]) -> inspect.Parameter:
    """The option of a setting.

    Arguments:
        of: the fields that it sets, by the name of the method, "" for a setting of all runs.
    """
    method, first = next(iter(of.items()))
    kind = _plain(get_type_hints(METHODS[method] if method else Config)[first.name])
    shown = flag(name)
    info = typer.Option(
        f"{shown}/--no-{shown[2:]}" if kind is bool else shown,
        help=f"{_help(of)} [default: {describe_default(name)}]",
        metavar="|".join(first.metadata["choices"]) or _NAMED.get(name) or _METAVARS.get(kind),
        show_default=False,  # the parser's default is None: not given
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _plain(hint: Any) -> Any:
    """The type that the command line reads: that of a Literal's texts, X for X | None."""
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) is Union or isinstance(hint, type(int | None)):
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return hint


def _help(of: dict[str, Field[Any]]) -> str:
    """The help texts of a setting, each with the methods that it is for."""
    texts: dict[str, list[str]] = {}
    for method, one in of.items():
        texts.setdefault(one.metadata["help"], []).append(method)
    said = [t if m == [""] else f"{', '.join(m)}: {t}" for t, m in texts.items()]
    return " ".join(said)
