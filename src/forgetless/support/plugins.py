"""Code of users: by file or module (`train.py:make`), and as plug-ins of installed packages.

A package declares plug-ins as entry points of the groups `forgetless.methods`,
`forgetless.scenarios` and `forgetless.models`; an object in a file is `my_file.py:Name`. A plug-in
is imported when its name is used, so that a broken package breaks nothing else.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

from forgetless.support.provenance import code_around, digest_of
from forgetless.support.validation import ConfigError, did_you_mean, first_line, unknown

AS_GIVEN = "as given"
_KNOWN = ("abc", "builtins", "forgetless", "functools", "torch", "typing")
_SCRIPTS = "_forgetless_scripts_"  # what the modules of loaded files are called


def import_path(made: Any) -> str:
    """Where a class or function is defined, such as "train:make"; `AS_GIVEN` for other objects.

    A script has the name of its file, whether it was run, imported or loaded.
    """
    name, module = getattr(made, "__qualname__", ""), getattr(made, "__module__", None)
    if not name or "<" in name or not isinstance(module, str):
        return AS_GIVEN
    file = getattr(sys.modules.get(module), "__file__", None)
    if file and (module == "__main__" or module.startswith(_SCRIPTS)):
        module = Path(file).stem
    return f"{module}:{name}"


def load_object(text: str, argument: str) -> Any:
    """The object at "file.py:name" or "package.module:name".

    Arguments:
        text: where it is. Its file or module is executed, as an import is.
        argument: what the user calls it.
    """
    place, colon, name = text.rpartition(":")
    if not (colon and place and name):
        raise ConfigError(f"{argument} must be FILE:NAME, such as script.py:make, not {text!r}")
    found: Any = _module(place, argument)
    for part in name.split("."):
        if not hasattr(found, part):
            meant = did_you_mean(part, [n for n in dir(found) if not n.startswith("_")])
            raise ConfigError(f"{argument} {text}: {place} has no {name}{meant}")
        found = getattr(found, part)
    return found


def code_of(made: Any) -> str:
    """The code of a user's function or class (with its bases) as text, without comments.

    What its file and the modules next to it give it counts too, such as constants and helpers, and
    a function's bound values: those of a closure, of defaults, of a `partial`. The text
    is empty for code of torch and of this package, whose versions a trace has.
    """
    return _code_of(made, frozenset())


def _code_of(made: Any, seen: frozenset[int]) -> str:
    if id(made) in seen:  # a function that calls itself
        return ""
    seen |= {id(made)}
    if isinstance(made, partial):
        bound = [*made.args, *made.keywords, *made.keywords.values()]
        return "\n".join([_code_of(made.func, seen), *(_bound(value, seen) for value in bound)])
    if str(getattr(made, "__module__", "")).split(".")[0] in _KNOWN and not isinstance(made, type):
        return ""
    if isinstance(made, type):
        kinds = [k for k in made.__mro__ if k.__module__.split(".")[0] not in _KNOWN]
        return "\n".join(part for kind in kinds for part in (_source(kind), code_around(kind)))
    bound = [*(getattr(made, "__defaults__", None) or ())]
    for cell in getattr(made, "__closure__", None) or ():
        with suppress(ValueError):  # not set yet
            bound.append(cell.cell_contents)
    parts = [_source(made), code_around(made), *(_bound(value, seen) for value in bound)]
    return "\n".join(parts)


def _bound(value: Any, seen: frozenset[int]) -> str:
    """A value that a function is bound to, as text that is the same in every process."""
    if hasattr(value, "state_dict") and not isinstance(value, type):  # a network: its weights
        return _bound(value.state_dict(), seen)
    if isinstance(value, Mapping):
        return " ".join(f"{_bound(k, seen)}: {_bound(v, seen)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_bound(part, seen) for part in value)
    if callable(value):
        return import_path(value) + _code_of(value, seen)
    if hasattr(value, "tobytes") or hasattr(value, "detach"):  # whose text leaves numbers out
        return digest_of(value)
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _source(made: Any) -> str:
    try:
        if getattr(made, "__name__", "") == "<lambda>":
            raise TypeError("its lines hold other code too")
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(made))))
    except (OSError, TypeError, SyntaxError, ValueError):  # a lambda, or typed in
        parts = [made] if inspect.isroutine(made) else list(vars(made).values())
        codes = [getattr(part, "__code__", None) for part in parts]
        return " ".join(_compiled(code) for code in codes if code)


def _compiled(code: CodeType) -> str:
    constants = [_compiled(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _module(place: str, argument: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ImportError as error:
            raise ConfigError(f"{argument} {place} cannot be imported: {error}") from error
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{argument} {place} is not a file")
    name = _SCRIPTS + hashlib.sha256(os.fsencode(file)).hexdigest()[:12]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{argument} {place} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(file.parent))  # as for a script that is run
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"{argument} {place} cannot be executed: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(str(file.parent))
    return module


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
