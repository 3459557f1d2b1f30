"""Fields of the option dataclasses: a default, its help text and what is accepted, in one place.

The command line, the saved configuration and the documentation all read them from here.
"""

from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any

from forgetless.support.validation import Accepted


def option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), accepted: Accepted | None = None
) -> Any:
    """A dataclass field that is also a command-line option."""
    return field(default=default, metadata={"help": help, "choices": choices, "accepted": accepted})


def flag(name: str) -> str:
    """An option as it is written on the command line."""
    return "--" + name.replace("_", "-")


def check_numbers(
    kind: type[Any], values: Mapping[str, object], named: Callable[[str], str] = str
) -> None:
    """Refuse numbers that the fields of an option dataclass do not accept.

    Arguments:
        kind: the dataclass.
        values: by the names of the fields; those that are missing are not looked at.
        named: from a field's name to what the user calls it.
    """
    for f in fields(kind):
        accepted = f.metadata.get("accepted")
        if accepted is not None and f.name in values:
            accepted.check(named(f.name), values[f.name])
