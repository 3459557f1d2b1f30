"""Command-line options: those that commands share, and one for every setting of a run."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from forgetless.cli.groups import completing
from forgetless.data import SCENARIOS
from forgetless.launch.engines import Cluster, Engine, InProcess, Processes
from forgetless.launch.runs import ALL_RUNS, Config, describe_default, setting_fields
from forgetless.launch.search import searchable
from forgetless.methods import METHODS, method_class, method_options
from forgetless.report.loggers import LOGGERS
from forgetless.support.plugins import PluginKind, installed, short_name
from forgetless.support.validation import ConfigError, flag, require, unknown
from forgetless.trace import Keep

ENGINES = ("local", "ray")


def _with_installed(kind: PluginKind, builtin: Iterable[str]) -> list[str]:
    return sorted({*builtin, *installed(kind)})


def method_names() -> list[str]:
    """The built-in methods and those of installed packages."""
    return _with_installed("method", METHODS)


Scenario = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO",
        help="The tasks; `forgetless list` shows all. Or your own, my_file.py:tasks.",
        autocompletion=completing(lambda: _with_installed("scenario", SCENARIOS)),
    ),
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data", help="Folder with datasets.  [default: FORGETLESS_DATA, then the cache]"
    ),
]
Script = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="FILE.py:FUNCTION",
        help="A function that returns the tasks, the model or both of runs that a script made.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for the results.  [default: a new one in runs/]"),
]
OutPlace = Annotated[
    str | None,
    typer.Option(
        "--out",
        help="Folder for the results, or shared storage such as s3://…  "
        "[default: a new one in runs/]",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace earlier results in --out.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="If the run in --out is complete, show its results. An unfinished one is resumed with "
        "or without this option.",
    ),
]
CheckpointEvery = Annotated[
    float,
    typer.Option(
        "--checkpoint-every",
        metavar="MINUTES",
        help="Time between checkpoints within a task; there is one after each task too. 0: none.",
    ),
]
Kept = Annotated[
    str,
    typer.Option(
        "--keep",
        metavar="all|weights|nothing",
        autocompletion=completing(lambda: get_args(Keep)),
        help="Tensors stored in the trace: weights and the method's memory, weights, or none.",
    ),
]
Analyse = Annotated[
    bool | None,
    typer.Option(
        "--analyse/--no-analyse",
        help="Analyse from the weights why tasks were forgotten, for the report. "
        "[default: on digits, where it takes seconds]",
        show_default=False,
    ),
]
Log = Annotated[
    str,
    typer.Option(
        "--log",
        metavar="NAMES",
        help=f"Log accuracies to {', '.join(LOGGERS)} (comma-separated).",
        autocompletion=completing(lambda: LOGGERS),
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="An option of the method, by its name, which `forgetless list METHOD` shows; "
        "repeat it for several.",
    ),
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="|".join(ENGINES),
        autocompletion=completing(lambda: ENGINES),
        help="Train on this machine, or on a Ray cluster.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="Address of the Ray cluster, such as 10.0.0.1:6379.  [default: RAY_ADDRESS, or a new "
        "cluster on this machine]",
    ),
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        metavar="N",
        help="Runs, or groups of a run's seeds, trained at a time, each in a process with its "
        "share of the threads. With ray: jobs that share a GPU; without GPUs a job takes one "
        "processor.",
    ),
]


@contextmanager
def engine_for(name: str, address: str | None, jobs: int) -> Iterator[Engine]:
    """The engine that --engine, --address and --jobs ask for."""
    require(name in ENGINES, "--engine", name, " or ".join(ENGINES), ENGINES)
    require(jobs >= 1, "--jobs", jobs, "a number of jobs at a time, at least 1")
    if name == "ray":
        with closing(Cluster(address, jobs)) as cluster:
            yield cluster
        return
    if address is not None:
        raise ConfigError(f"--address {address} is only for Ray: add --engine ray")
    yield InProcess() if jobs == 1 else Processes(jobs)


_METAVARS = {int: "N", float: "X", str: "TEXT"}
_NAMED = {"budget": "SIZE|auto"}
_ARGUMENTS = ("scenario", "method")  # not options with a default


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for every setting of a run.

    The command's own parameters come first; it receives the settings that were given, by name, as
    `settings`. A setting that was not given is left to the scenario's preset. A parameter of the
    command that is called as a setting takes the place of its option.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
    taken = {p.name for p in own}
    options = [
        _parameter(name, found)
        for name, found in setting_fields().items()
        if name not in _ARGUMENTS and name not in taken
    ]
    names = [p.name for p in options]

    def wrapper(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in names}
        settings = {name: value for name, value in given.items() if value is not None}
        command(**arguments, settings=settings)

    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in own + options}
    return wrapper


def _parameter(name: str, by_method: dict[str, Field[Any]]) -> inspect.Parameter:
    """The option of a setting.

    Arguments:
        by_method: the fields that it sets, as `setting_fields` has them.
    """
    method, first = next(iter(by_method.items()))
    owner = Config if method == ALL_RUNS else METHODS[method]
    kind = _plain(get_type_hints(owner)[first.name])
    shown = flag(name)
    info = typer.Option(
        f"{shown}/--no-{shown[2:]}" if kind is bool else shown,
        help=f"{_help(by_method)} [default: {describe_default(name)}]",
        metavar="|".join(first.metadata["choices"]) or _NAMED.get(name) or _METAVARS.get(kind),
        show_default=False,  # the parser's default is None: not given
        autocompletion=completing(lambda: first.metadata["choices"]),
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _plain(hint: Any) -> Any:
    """The type that the command line reads: str for a Literal, X for X | None."""
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) is Union or isinstance(hint, type(int | None)):
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return hint


def _help(by_method: dict[str, Field[Any]]) -> str:
    """The help texts of a setting, each with its methods."""
    texts: dict[str, list[str]] = {}
    for method, field in by_method.items():
        texts.setdefault(field.metadata["help"], []).append(method)
    return " ".join(t if m == [ALL_RUNS] else f"{', '.join(m)}: {t}" for t, m in texts.items())


def values_to_set(texts: Sequence[str], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The values of --set by method and option.

    Arguments:
        texts: each NAME=VALUE; every method that has the option gets the value.
        methods: names, or plug-ins.
    """
    found: dict[str, dict[str, Any]] = {method: {} for method in methods}
    for text in texts:
        given, equals, value = text.partition("=")
        name = given.strip().replace("-", "_")
        require(bool(name and equals), "--set", text, "NAME=VALUE, such as threshold=0.9")
        takers = [method for method in methods if name in method_options(method)]
        if not takers:
            whose = ", ".join(map(short_name, methods))
            known = dict.fromkeys(option for method in methods for option in method_options(method))
            raise ConfigError(unknown(f"option of {whose}", name, known))
        for method in takers:
            once = name not in found[method]
            require(once, "--set", text, f"given once for each option, and {name} has a value")
            found[method][name] = _parsed(method, name, value.strip())
    return found


def grids_from(texts: Sequence[str], methods: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """The values of --grid by option, or by "method:option".

    Arguments:
        texts: each NAME=VALUE,VALUE,… or METHOD:NAME=VALUE,….
        methods: names, or plug-ins.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        given, equals, values = text.partition("=")
        owner, _, name = given.strip().rpartition(":")
        name = name.replace("-", "_")
        require(bool(name and equals), "--grid", text, "NAME=VALUES, such as lr=0.01,0.1")
        parts = [part.strip() for part in values.split(",") if part.strip()]
        require(
            bool(parts), "--grid", text, "NAME=VALUES with at least one value, such as lr=0.01,0.1"
        )
        where = f"{owner}:{name}" if owner else name
        require(where not in found, "--grid", text, f"given once for each option, and {where} is")
        own = [m for m in methods if not owner or owner in (m, short_name(m), method_class(m).name)]
        kinds = [m for m in own if name in searchable(method_class(m))]
        read = [_parsed(kinds[0], name, part, "--grid") for part in parts] if kinds else parts
        found[where] = tuple(read)  # what no method has is rejected with the rest of the grid
    return found


def _parsed(method: str, name: str, text: str, argument: str = "--set") -> Any:
    """The value of an option of a method or of all runs, of the type that its field has."""
    own = method_options(method)
    owner: Any = method_class(method) if name in own else Config
    try:
        hint = get_type_hints(owner).get(own[name].name if name in own else name)
    except NameError:  # of a type that is imported for type checkers only
        hint = None
    kind = _plain(hint)
    if text.lower() == "none" and kind is not hint:
        return None
    switches = {"true": True, "yes": True, "false": False, "no": False}
    if kind is bool:
        require(text.lower() in switches, f"{argument} {name}", text, "true or false")
        return switches[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            accepted = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{argument} {name} must be {accepted}, not {text!r}") from None
    return text
