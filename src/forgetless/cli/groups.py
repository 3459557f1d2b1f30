"""Commands with subcommands, which suggest the nearest name, and completions for a shell."""

from collections.abc import Callable, Iterable
from typing import Any

from typer.core import TyperGroup

from forgetless.support.validation import ConfigError, unknown


class Group(TyperGroup):
    """A command with subcommands that suggests one for a name that it does not have."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The subcommand that the first word names."""
        known = self.list_commands(ctx)
        if args[0] not in known and args[0].isidentifier() and not ctx.resilient_parsing:
            raise ConfigError(unknown("command", args[0], known))
        return super().resolve_command(ctx, args)


def completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Completions of a word: the names that begin so, after a comma of the last of several.

    Arguments:
        names: gives them when a shell asks.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in names() if name.startswith(last)]

    return complete
