"""Functions and classes by the file or module that defines them: `train.py:make`, and back."""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import textwrap
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from forgetless.support.errors import ConfigError
from forgetless.support.source import code_around

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
    try:
        found: Any = _module(place, argument)
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ConfigError(f"{argument} {text}: {place} has no {name}") from None
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
        weights = {n: t for n, t in value.state_dict().items() if hasattr(t, "is_floating_point")}
        # To six digits, which do not depend on the order of the sums.
        return " ".join(f"{name} {float(t.double().sum()):.6g}" for name, t in weights.items())
    if callable(value):
        return import_path(value) + _code_of(value, seen)
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
