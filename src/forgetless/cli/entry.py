"""The command as a process: signals, warnings, and one sentence for whatever goes wrong."""

import signal
import sys
import warnings
from typing import TextIO

import typer

from forgetless.cli.main import app
from forgetless.support import signals
from forgetless.support.errors import ForgetlessError, ForgetlessWarning, TrainingError

_INTERRUPTED = 130
_STOPPED = {signal.SIGINT: "interrupted", signal.SIGTERM: "stopped by SIGTERM"}
# The base of typer's own errors, wherever the installed version keeps it.
_UsageError: type[Exception] = next(
    c
    for c in typer.BadParameter.__mro__
    if c.__name__ == "ClickException" and issubclass(c, Exception)
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; one sentence and an exit status for whatever goes wrong."""
    command = typer.main.get_command(app)
    for output in (sys.stdout, sys.stderr):  # a terminal that has no ° shows ? and goes on
        if hasattr(output, "reconfigure"):
            output.reconfigure(errors="replace")
    with warnings.catch_warnings(), signals.watched(signal.SIGINT, signal.SIGTERM):
        warnings.simplefilter("always", ForgetlessWarning)
        warnings.showwarning = _show_warning
        try:
            result = command.main(arguments, prog_name="forgetless", standalone_mode=False)
            # Ctrl-C arrives as a result or as Abort, depending on the version of typer.
            if result == _INTERRUPTED:
                raise KeyboardInterrupt
            sys.exit(result if isinstance(result, int) else 0)
        except (KeyboardInterrupt, typer.Abort):
            number = signals.pending() or signal.SIGINT
            _fail(
                f"{_STOPPED[signal.Signals(number)]}; the same command goes on from what was saved",
                128 + number,
            )
        except TrainingError as error:
            _fail(str(error), 1)
        except (ForgetlessError, OSError) as error:
            _fail(str(error), 2)
        except _UsageError as error:
            message = error.format_message()  # type: ignore[attr-defined]
            _fail(f"{message.rstrip('.')}; --help shows what is accepted", 2)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """The sentence; where in the code it was noticed is of no use to who reads it."""
    print(f"forgetless: {message}", file=sys.stderr)  # noqa: T201


def _fail(sentence: str, status: int) -> None:
    print(f"forgetless: {sentence}", file=sys.stderr)  # noqa: T201
    sys.exit(status)
