"""The command `forgetless`: its subcommands, and one sentence for whatever goes wrong in them."""

import os
import signal
import sys
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn, final

import typer
from typer.core import TyperCommand

from forgetless.cli.groups import Group
from forgetless.support import signals
from forgetless.support.provenance import __version__, mistake_in
from forgetless.support.validation import (
    ConfigError,
    ForgetlessError,
    ForgetlessWarning,
    TrainingError,
    UserCodeError,
    did_you_mean,
)

# Name → module, attribute (a function or a Typer application) and its line in the help.
_COMMANDS = {
    "list": ("catalogue", "list_command", "Show the scenarios, methods and models."),
    "run": ("training", "run_command", "Train one method on the tasks of SCENARIO."),
    "compare": ("training", "compare_command", "Train several methods and compare them."),
    "tune": ("tune", "tune_command", "Choose settings of methods on held-out images."),
    "forecast": ("forecast", "forecast_command", "Predict what learning the next task will do."),
    "estimate": ("estimate", "estimate_command", "Say what protecting a model on disk will cost."),
    "report": ("report", "report_command", "Write an HTML report of runs."),
    "data": ("catalogue", "data_app", "Show which datasets are on disk, or fetch one."),
    "paper": ("paper", "paper_app", "Rebuild the paper's tables, figures and verdicts."),
    "doctor": ("doctor", "doctor_command", "Say what is installed here, and what is missing."),
}
_WELCOME = """\
forgetless: networks that forget less, and why they forget.

Keep what your own model has learned, in your own training loop:
  guard = forgetless.Guard(model, optimizer)    then train as before
  guard.end_task(loader)                        a task is learned: remember it
  docs/guard.md explains it; docs/llm.md is about language models.

Compare methods, on benchmarks or on your own data:
  forgetless compare rotated-digits             five methods in a minute or two, and a page
  forgetless list                               scenarios, methods and models to run
  docs/usage.md explains it; docs/methods.md says which method to take.

  forgetless doctor                             what is installed here, and what is missing
  forgetless --help                             all commands
"""
_MISTAKE = 3  # in a user's code, or here
_DEBUG = "FORGETLESS_DEBUG"
_INTERRUPTED = 130
_BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells have it
_STOPPED = {signal.SIGINT: "interrupted", signal.SIGTERM: "stopped by SIGTERM"}
# The base of typer's own errors, wherever the installed version keeps it.
_UsageError: type[Exception] = next(
    c
    for c in typer.BadParameter.__mro__
    if c.__name__ == "ClickException" and issubclass(c, Exception)
)


@final
class LazyGroup(Group):
    """A group that knows its commands by name and help line, and imports one when it is used.

    The commands need torch, which takes seconds to import; `--help` and `--version` do not.
    """

    _completes_names = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, line = _COMMANDS[cmd_name]
        if self._completes_names:
            return TyperCommand(cmd_name, help=line)
        target = getattr(import_module(f"forgetless.cli.{module}"), attribute)
        if not isinstance(target, typer.Typer):
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            single.command(cmd_name)(target)
            target = single
        command = typer.main.get_command(target)
        command.name = cmd_name
        return command

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The commands that begin so, none of which is imported."""
        self._completes_names = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self._completes_names = False

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in _COMMANDS.items()])


app = typer.Typer(
    cls=LazyGroup,
    help="Train networks on one task after another and see what they forget.",
    add_completion=True,  # two options that install it
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # one column of options reads better than a frame of four
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(_WELCOME, nl=False)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    command = typer.main.get_command(app)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&-
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    for output in (sys.stdout, sys.stderr):  # a terminal without ° shows ? instead
        if hasattr(output, "reconfigure"):
            output.reconfigure(errors="replace")
    with warnings.catch_warnings(), signals.watched(signal.SIGINT, signal.SIGTERM):
        warnings.simplefilter("always", ForgetlessWarning)
        warnings.showwarning = _show_warning
        try:
            _require_utf8(sys.argv[1:] if arguments is None else arguments)
            result = command.main(arguments, prog_name="forgetless", standalone_mode=False)
            # Ctrl-C arrives as a result or as Abort, depending on the version of typer.
            if result == _INTERRUPTED:
                raise KeyboardInterrupt
            sys.stdout.flush()
            sys.exit(result if isinstance(result, int) else 0)
        except BrokenPipeError:
            _leave_closed_pipe()
        except SystemExit as ended:
            # rich and typer turn a closed pipe into status 1, which means diverged training here.
            if isinstance(ended.__context__, BrokenPipeError):
                _leave_closed_pipe()
            if mistake_in(ended) is not None:
                _fail_in_code(ended)
            raise
        except (KeyboardInterrupt, typer.Abort):
            number = signals.pending() or signal.SIGINT
            stopped = _STOPPED[signal.Signals(number)]
            _fail(f"{stopped}; the same command resumes from what was saved", 128 + number)
        except TrainingError as error:
            _fail(str(error), 1)
        except UserCodeError as error:
            _fail_in_code(error)
        except (ForgetlessError, OSError) as error:
            _fail(str(error), 2)
        except _UsageError as error:
            _fail(_wrong_usage(error), 2)
        except Exception as error:
            _fail_in_code(error)


def _wrong_usage(error: Any) -> str:
    """The sentence about options or arguments that a command does not take."""
    name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if type(error).__name__ != "NoSuchOption" or context is None:
        return f"{error.format_message().rstrip('.')}; --help shows what is accepted"
    known = [o for p in context.command.params for o in (*p.opts, *p.secondary_opts)]
    meant = did_you_mean(name, [option for option in known if option.startswith("-")])
    return f"unknown option {name!r}{meant or '; --help shows all'}"


def _require_utf8(arguments: list[str]) -> None:
    """Reject names that no page, trace or JSON could hold; safetensors cannot open them either."""
    for text in arguments:
        given = text.encode("utf-8", "surrogateescape")
        if given != text.encode("utf-8", "replace"):
            shown = given.decode("utf-8", "backslashreplace")
            raise ConfigError(f"{shown} is not valid UTF-8; rename the file or folder")


def _leave_closed_pipe() -> NoReturn:
    """Exit quietly: whoever read the output, such as `head`, has seen enough."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (sys.stdout, sys.stderr):
        os.dup2(nowhere, output.fileno())
    sys.exit(_BROKEN_PIPE)


def _show_warning(
    message: Warning | str, category: type[Warning], *where: Any, **more: Any
) -> None:
    """Print the sentence without the place in the code."""
    print(f"forgetless: {message}", file=sys.stderr)  # noqa: T201


def _fail_in_code(error: BaseException) -> NoReturn:
    """Say which line of a user's code raised an error; one of this package has a traceback."""
    mistake, text = mistake_in(error), "".join(traceback.format_exception(error))
    if isinstance(error, UserCodeError):
        mistake, _, text = str(error).partition("\n")
    debugs = bool(os.environ.get(_DEBUG))
    if mistake is None or debugs:
        print(text, file=sys.stderr)  # noqa: T201
    if mistake is None:
        _fail("an error in forgetless itself", _MISTAKE)
    _fail(mistake if debugs else f"{mistake}; {_DEBUG}=1 shows the traceback", _MISTAKE)


def _fail(sentence: str, status: int) -> NoReturn:
    print(f"forgetless: {sentence}", file=sys.stderr)  # noqa: T201
    sys.exit(status)
