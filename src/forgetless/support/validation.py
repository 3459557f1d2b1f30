"""What users give: options with their accepted values, and the errors that reject all else.

An option is a dataclass field with a default, a help text and the accepted values in one place. The
command line, the saved configuration and the documentation all read them from here.
"""

import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeVar, final


class ForgetlessError(Exception):
    """Base of all errors that forgetless raises on purpose; the text is one clear sentence."""


class ConfigError(ForgetlessError, ValueError):
    """An invalid argument: names the argument, its value, and the accepted values."""


class DataError(ForgetlessError, ValueError):
    """A dataset that is missing, damaged or not the published one."""


class NoSamplesError(DataError):
    """A loader without samples."""


class TraceError(ForgetlessError, ValueError):
    """A run's folder that cannot be read or must not be overwritten."""


class RankError(ForgetlessError, RuntimeError):
    """Another process of the same training has ended or does not answer."""


class WorkerError(ForgetlessError, RuntimeError):
    """The processes that tried to train a run all died."""


class UnwritableError(TraceError, OSError):
    """A file of a run that the operating system refuses to write."""


class TrainingError(ForgetlessError, ArithmeticError):
    """Training diverged to NaN or infinity; names the seed, task and step."""


class MemoryShortageError(ForgetlessError, MemoryError):
    """Out of memory: says how much was needed and what would fit."""


class UserCodeError(ForgetlessError, RuntimeError):
    """An exception in a user's own code, in another process: file and line, then a traceback."""


class ForgetlessWarning(UserWarning):
    """A warning; one clear sentence."""


def warn_caller(message: str) -> None:
    """Warn at the user's line that led here, however deep inside forgetless and torch this is."""
    frame, level = sys._getframe(1), 2
    while frame.f_globals.get("__name__", "").partition(".")[0] in ("forgetless", "torch"):
        if frame.f_back is None:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ForgetlessWarning, stacklevel=level)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def require(
    satisfied: bool, argument: str, got: object, accepted: str, known: Iterable[str] = ()
) -> None:
    """Raise a ConfigError naming the argument, its value and the accepted values.

    Arguments:
        known: names among the accepted values; the one nearest to a wrong name is suggested.
    """
    if not satisfied:
        raise ConfigError(f"{argument} must be {accepted}, not {got!r}{did_you_mean(got, known)}")


def did_you_mean(got: object, known: Iterable[str]) -> str:
    """The end of a sentence about a wrong name: the nearest known one, or nothing."""
    if not isinstance(got, str):
        return ""
    written = {_plain(name): name for name in known}
    near = get_close_matches(_plain(got), written, 1)
    return f": did you mean {written[near[0]]!r}?" if near else ""


def unknown(what: str, name: str, known: Collection[str]) -> str:
    """The sentence about a name that does not exist, with the nearest one that does.

    Arguments:
        what: the kind of thing, such as "method".
        name: as given.
        known: all names; where there are many, the nearest one stands alone.
    """
    meant = did_you_mean(name, known)
    there_are = f"here are {', '.join(known) or 'none'}"
    if not meant:
        return f"unknown {what} {name!r}; t{there_are}"
    more = f" T{there_are}" if 1 < len(known) <= _MANY else ""
    return f"unknown {what} {name!r}{meant}{more}"


def beginnings(names: Iterable[str]) -> dict[str, None]:
    """Every beginning in whole parts of dotted names: a, a.b and a.b.c of a.b.c."""
    split = [name.split(".") for name in names]
    return {".".join(parts[:n]): None for parts in split for n in range(1, len(parts) + 1)}


def _plain(name: str) -> str:
    """A name as it is compared: PCA_OGD is pca-ogd."""
    return name.casefold().replace("_", "-")


_MANY = 20  # names that a sentence has no room for
Options = TypeVar("Options")


@final
@dataclass(frozen=True)
class Accepted:
    """The values that an argument accepts.

    Arguments:
        fits: whether a value is one of them.
        words: their description in an error message.
        known: the names among them.
    """

    fits: Callable[[Any], bool]
    words: str
    known: tuple[str, ...] = ()

    def check(self, argument: str, value: object) -> None:
        """Reject a value that does not fit."""
        require(self.fits(value), argument, value, self.words, self.known)


def is_whole(value: object) -> bool:
    """Whether a value is an integer of Python or NumPy (not a bool)."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether a value is a finite number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def whole(least: int) -> Accepted:
    """Integers ≥ least."""
    return Accepted(
        lambda value: is_whole(value) and value >= least, f"a whole number of at least {least}"
    )


def real(least: float) -> Accepted:
    """Finite numbers ≥ least."""
    return Accepted(
        lambda value: is_real(value) and value >= least, f"a finite number of at least {least:g}"
    )


FINITE = Accepted(is_real, "a finite number")
POSITIVE = Accepted(lambda value: is_real(value) and value > 0, "a positive number")
SHARE = Accepted(lambda value: is_real(value) and 0 < value < 1, "a share in (0, 1)")
SHARE_OR_ZERO = Accepted(lambda value: is_real(value) and 0 <= value < 1, "a number in [0, 1)")
FRACTION = Accepted(lambda value: is_real(value) and 0 <= value <= 1, "a share in [0, 1]")


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    accepted: Accepted | None = None,
    setting: str = "",
    search: tuple[Any, ...] = (),
) -> Any:
    """A dataclass field that is also a command-line option.

    Arguments:
        default: its value if not given.
        help: one sentence for people.
        choices: the accepted texts, if only some are.
        accepted: the accepted numbers, if only some are.
        setting: the option's name on the command line and in a configuration, if not the field's.
        search: the values that `forgetless tune` tries if it is told no others, from small to
            large; none for an option that it leaves alone, such as a budget.
    """
    metadata = {"help": help, "choices": choices, "accepted": accepted, "setting": setting}
    return field(default=default, metadata=metadata | {"search": search})


def setting_name(option_field: Field[Any]) -> str:
    """The name of a field's option on the command line and in a configuration."""
    return option_field.metadata.get("setting") or option_field.name


def flag(name: str) -> str:
    """An option as written on the command line."""
    return "--" + name.replace("_", "-")


def select_options(kind: Callable[..., Options], values: Mapping[str, Any]) -> Options:
    """The options of one dataclass, from the values of a configuration that has others too."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})


def check_options(
    kind: type[Any], values: Mapping[str, object], named: Callable[[str], str] = str
) -> None:
    """Reject values that the fields of an option dataclass do not accept.

    Arguments:
        kind: the dataclass.
        values: by field name; missing ones are not checked.
        named: field name → the name in error messages.
    """
    for f in fields(kind):
        if f.name in values:
            check_option(f, values[f.name], named(f.name))


def check_option(option_field: Field[Any], value: object, argument: str) -> None:
    """Reject a value that a field does not accept; None is accepted where it is the default."""
    accepted = option_field.metadata.get("accepted")
    choices = option_field.metadata.get("choices")
    if value is None and option_field.default is None:
        return
    if choices:
        require(value in choices, argument, value, " or ".join(choices), choices)
    if accepted is not None:
        accepted.check(argument, value)


AUTO = "auto"  # as a budget: all bytes that are free
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(budget: str | int) -> int:
    """The number of bytes in "512MB", "1.5 GiB" or an integer."""
    accepted = "a number of bytes such as '512MB', '1.5GiB' or 10_000_000"
    count = -1.0
    if isinstance(budget, str):
        text = budget.strip().lower().replace(" ", "")
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
        with suppress(ValueError, KeyError):
            count = float(digits) * _UNITS[text[len(digits) :] or "b"]
    elif isinstance(budget, int | float) and not isinstance(budget, bool):
        count = float(budget)
    require(1 <= count < float("inf"), "budget", budget, accepted)
    return int(count)


def format_bytes(count: float) -> str:
    """A number of bytes for people, such as 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
