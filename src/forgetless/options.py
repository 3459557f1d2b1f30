"""Fields of the option dataclasses: a default and its help text, in one place.

The command line, the saved configuration and the documentation all read them from here.
"""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that is also a command-line option."""
    return field(default=default, metadata={"help": help, "choices": choices})
