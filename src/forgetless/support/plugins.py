"""Plug-ins: methods, scenarios and models in installed packages, or in a file of the user's.

A package declares them as entry points of the groups `forgetless.methods`, `forgetless.scenarios`
and `forgetless.models`; an object in a file is `my_file.py:Name`. A plug-in is imported when its
name is used, so that a broken package breaks nothing else.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from forgetless.support.errors import ConfigError, first_line
from forgetless.support.imports import load_object

PluginKind = Literal["method", "scenario", "model"]


@cache
def installed(kind: PluginKind) -> Mapping[str, EntryPoint]:
    """The plug-ins of installed packages, by name, without importing them."""
    return {entry.name: entry for entry in entry_points(group=f"forgetless.{kind}s")}


def is_in_file(name: str) -> bool:
    """Whether a name is that of an object in a file or module, such as "my_file.py:OWM"."""
    return ":" in name or name.endswith(".py")


def plugin(kind: PluginKind, name: str, builtin: Collection[str]) -> Any:
    """The object of a plug-in.

    Arguments:
        kind: what it is.
        name: of an installed plug-in, or an object in a file.
        builtin: other names, for the error if there is no such plug-in.
    """
    if is_in_file(name):
        return load_object(name, f"--{kind}")
    entry = installed(kind).get(name)
    if entry is None:
        raise ConfigError(unknown(kind, name, [*builtin, *installed(kind)]))
    try:
        return entry.load()
    except Exception as error:
        package = f" of {entry.dist.name}" if entry.dist is not None else ""
        reason = first_line(error)
        raise ConfigError(
            f"the {kind} {name!r}{package} cannot be imported: {type(error).__name__}: {reason}"
        ) from error


def unknown(what: str, name: str, known: Collection[str]) -> str:
    """The sentence about a name that does not exist, with the nearest one that does."""
    near = get_close_matches(name, known, 1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown {what} {name!r}{meant}; there are {', '.join(known) or 'none'}"


def wrong_kind(kind: PluginKind, name: str, found: Any, wanted: str) -> ConfigError:
    """The error about a plug-in that is something else."""
    what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
    return ConfigError(f"--{kind} {name} must be {wanted}, and is {what}")


def absolute(name: str) -> str:
    """The name with the absolute path of its file, for processes in other folders."""
    place, colon, rest = name.rpartition(":")
    if not place.endswith(".py"):
        return name
    return f"{Path(place).expanduser().resolve()}{colon}{rest}"


def short_name(name: str) -> str:
    """The name for people and folders: that of the object in a file."""
    return name.rpartition(":")[2] if is_in_file(name) else name


def accepted(maker: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a plug-in's function and their defaults (`inspect.Parameter.empty`)."""
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default for p in parameters if p.kind in named}


def make(kind: PluginKind, name: str, maker: Any, offered: Mapping[str, Any]) -> Any:
    """The result of a plug-in's function, called with those arguments that it takes.

    Arguments:
        maker: the function or class; another object is the result itself.
        offered: arguments by name.
    """
    if not callable(maker):
        return maker
    taken = accepted(maker)
    lacking = [n for n, d in taken.items() if d is inspect.Parameter.empty and n not in offered]
    if lacking:
        raise ConfigError(
            f"the {kind} {name} needs {', '.join(lacking)}; it may take {', '.join(offered)}"
        )
    try:
        return maker(**{n: value for n, value in offered.items() if n in taken})
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the {kind} {name} cannot be made: {type(error).__name__}: {error}"
        ) from error
