"""Options: dataclass fields with a default, a help text and the accepted values in one place.

The command line, the saved configuration and the documentation all read them from here.
"""

from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from typing import Any

from forgetless.support.errors import require
from forgetless.support.validation import Accepted


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    accepted: Accepted | None = None,
    setting: str = "",
) -> Any:
    """A dataclass field that is also a command-line option.

    Arguments:
        default: its value if not given.
        help: one sentence for people.
        choices: the accepted texts, if only some are.
        accepted: the accepted numbers, if only some are.
        setting: the option's name on the command line and in a configuration, if not the field's.
    """
    metadata = {"help": help, "choices": choices, "accepted": accepted, "setting": setting}
    return field(default=default, metadata=metadata)


def setting_name(of: Field[Any]) -> str:
    """The name of a field's option on the command line and in a configuration."""
    return of.metadata.get("setting") or of.name


def flag(name: str) -> str:
    """An option as it is written on the command line."""
    return "--" + name.replace("_", "-")


def check_options(
    kind: type[Any], values: Mapping[str, object], named: Callable[[str], str] = str
) -> None:
    """Reject values that the fields of an option dataclass do not accept.

    Arguments:
        kind: the dataclass.
        values: by the names of the fields; missing ones are not checked.
        named: from a field's name to what the user calls it.
    """
    for f in fields(kind):
        if f.name in values:
            check_option(f, values[f.name], named(f.name))


def check_option(of: Field[Any], value: object, called: str) -> None:
    """Reject a value that a field does not accept; None is fine where it is the default."""
    accepted, choices = of.metadata.get("accepted"), of.metadata.get("choices")
    if value is None and of.default is None:
        return
    if choices:
        require(value in choices, called, value, " or ".join(choices))
    if accepted is not None:
        accepted.check(called, value)
