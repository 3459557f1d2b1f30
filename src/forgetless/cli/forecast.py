"""The command `forgetless forecast`: the effect of the next task, before it is trained on."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file

from forgetless.cli.options import DataFolder, Script, Set, values_to_set
from forgetless.data import SCENARIOS, Scenario, Task, grows_with_tasks
from forgetless.launch.rebuild import (
    Rebuilt,
    forecast_run,
    load_from_script,
    method_step,
    rebuild,
    samples_of,
)
from forgetless.launch.runs import resolve
from forgetless.methods import METHODS, PCAOGD, Method, build_method, method_options
from forgetless.support.plugins import installed
from forgetless.support.validation import ConfigError, ForgetlessWarning, TraceError, require
from forgetless.theory import (
    TRUSTED,
    Effect,
    LinearisedForecast,
    Prediction,
    linearised_forecast,
)
from forgetless.trace import Trace, load_trace, nulls
from forgetless.training.fit import resolve_device
from forgetless.training.forecasting import Forecast
from forgetless.training.settings import Training

_NEARLY_ALL = 0.95  # of the training


def forecast_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder of a trace; with --checkpoint, a scenario.")
    ],
    source: Annotated[
        int,
        typer.Option("--source", metavar="N", help="Learned task, from 1; the weights after it."),
    ] = 1,
    target: Annotated[
        int | None,
        typer.Option("--target", metavar="N", help="Next task.  [default: source + 1]"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seed of the trace.  [default: first]")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="Weights of the scenario's model, a safetensors file."),
    ] = None,
    script: Script = "",
    method: Annotated[
        str,
        typer.Option(
            "--method", help="Method, such as ogd or my_file.py:OWM.  [default: the run's]"
        ),
    ] = "",
    to_set: Set = None,
    lr: Annotated[
        float | None, typer.Option("--lr", metavar="X", help="Learning rate.  [default: the run's]")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option("--epochs", metavar="N", help="Passes over the task.  [default: the run's]"),
    ] = None,
    linearised: Annotated[
        bool,
        typer.Option("--linearised", help="Forecast by the linearised network: slow, for SGD."),
    ] = False,
    components: Annotated[
        str | None,
        typer.Option(
            "--components",
            help="With --linearised: numbers of directions to try with PCA-OGD, comma-separated.  "
            "[default: 25,50,100,200]",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --linearised: fewer and larger steps.")
    ] = False,
    data: DataFolder = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, …")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the forecast as JSON.")] = False,
) -> None:
    """Predict what learning the next task will do to a learned one.

    A copy of the network learns the task in a tenth of the steps at ten times the learning rate,
    with the run's method and optimizer.
    """
    target = source + 1 if target is None else target
    for name, given in (("--components", components is not None), ("--quick", quick)):
        if given and not linearised:
            raise ConfigError(f"{name} is an option of --linearised, which is missing")
    if checkpoint is None:
        trace = _trace_of(run, seed)
    else:
        trace = _checkpoint_of(run, checkpoint, source, seed)
    number = trace.seeds[0] if seed is None else seed
    benchmark = None if checkpoint is None else run
    rebuilt = _rebuilt(trace, benchmark, source, target, script, data)
    require(bool(method) or not to_set, "--set", to_set, "an option of --method, which is missing")
    own = values_to_set(to_set or [], [method])[method] if method else {}
    tasks = rebuilt.tasks
    known, coming = (tasks.task(t - 1, [number]) for t in (source, target))
    where = resolve_device(device)
    names = {"scenario": trace.scenario, "source": source, "target": target, "seed": number}
    with Console(stderr=True).status("forecast") as status:
        if linearised:
            also = _method_of(method, trace, own) if method else None
            counts = _counts("25,50,100,200" if components is None else components)
            found = _linearised(
                rebuilt, trace, number, source, target, also, counts, lr, epochs, quick, where,
                status.update,
            )  # fmt: skip
        else:
            chosen = _method_of(method or _method_name(trace), trace, own)
            asked = {"lr": lr, "epochs": epochs}
            settings: dict[str, Any] = {n: v for n, v in asked.items() if v is not None}
            changed = replace(rebuilt, training=replace(rebuilt.training, **settings))
            result = forecast_run(
                changed, chosen, trace, number, source - 1, target - 1, device=where
            )
    if as_json:
        summary = found.summary() if linearised else {"method": chosen.name, **result.summary()}
        typer.echo(json.dumps(nulls(names | summary), allow_nan=False))
    elif linearised:
        _show_linearised(found, known, coming)
    else:
        _show(result, known, coming, chosen.label or chosen.name)


def _linearised(
    rebuilt: Rebuilt,
    trace: Trace,
    seed: int,
    source: int,
    target: int,
    also: Method[Any] | None,
    components: list[int],
    lr: float | None,
    epochs: int | None,
    quick: bool,
    device: torch.device,
    on_stage: Callable[[str], None],
) -> LinearisedForecast:
    """The forecast by the linearised network, which is of SGD."""
    tasks, training = rebuilt.tasks, rebuilt.training
    if not training.is_constant_sgd and lr is None:
        raise ConfigError(
            "a linearised forecast is of plain SGD, and the run trained with another optimizer, "
            "schedule or augmentation: choose the learning rate of SGD with --lr, or leave out "
            "--linearised"
        )
    model = rebuilt.network(trace.weights(seed, source - 1)).to(device)
    methods = {}
    if also is not None:
        methods[also.label or also.name] = method_step(rebuilt, also, trace, seed, source)
    known, coming = (tasks.task(t - 1, [seed]) for t in (source, target))
    result = linearised_forecast(
        model,
        samples_of(known.test),
        samples_of(coming.train),
        lr=lr if lr is not None else training.lr,
        epochs=epochs if epochs is not None else training.epochs,
        batch_size=training.batch_size,
        source_classes=tasks.competing(source - 1, target - 1),
        target_classes=tasks.competing(target - 1),
        components=components,
        remember=samples_of(known.train),
        samples=_samples(trace.scenario),
        exclude=rebuilt.out_of_reach(model),
        methods=methods,
        quick=quick,
        seed=seed,
        on_stage=on_stage,
    )
    _warn_of_other_training(training)
    return result


def _method_name(trace: Trace) -> str:
    """The run's method, unless only a script has it: nothing that a trace names is imported."""
    if trace.method not in METHODS and trace.method not in installed("method"):
        raise ConfigError(
            f"the run's method {trace.method} is a script's own: name it with --method FILE.py:NAME"
        )
    return trace.method


def _rebuilt(
    trace: Trace,
    benchmark: str | None,
    source: int,
    target: int,
    script: str,
    data: Path | None,
) -> Rebuilt:
    """What a run was made with, with the source and the target among its tasks.

    Arguments:
        benchmark: its name, if the weights are a file's and not a run's.
    """
    tasks, network = load_from_script(script) if script else (None, None)
    learned = f"a task that the run has learned, from 1 to {len(trace.tasks)}"
    known = benchmark is not None or 1 <= source <= len(trace.tasks)
    require(known, "--source", source, learned)
    for name, task in (("--source", source), ("--target", target)):
        _check_task(name, task, trace, tasks, benchmark or "the run")
    require(source != target, "--target", target, "another task than --source")
    needed = max(source, target)
    return rebuild(trace, tasks=tasks, model=network, data=data, n_tasks=needed, download=True)


def _counts(components: str) -> list[int]:
    """The numbers of directions in --components."""
    counts = [part.strip() for part in components.split(",") if part.strip()]
    numeric = all(c.isascii() and c.isdigit() and int(c) > 0 for c in counts)
    require(numeric, "--components", components, "counts such as 25,100")
    return list(map(int, counts))


def _warn_of_other_training(training: Training) -> None:
    """Warn if the run did not train by plain SGD at a constant rate, which a forecast is of."""
    if not training.is_constant_sgd:
        names = ("optimizer", "momentum", "weight_decay", "schedule", "augmentation")
        used = {name: getattr(training, name) for name in names}
        others = [f"{n} {v}" for n, v in used.items() if v != getattr(Training, n)]
        warnings.warn(
            f"the forecast is for plain SGD, and the run was trained with {', '.join(others)}",
            ForgetlessWarning,
            stacklevel=3,
        )


def _trace_of(run: str, seed: int | None) -> Trace:
    """The trace in a run's folder, which must have the seed."""
    if run in SCENARIOS and not Path(run).exists():
        raise ConfigError(f"{run} is a scenario: add --checkpoint FILE, or name a run's folder")
    trace = load_trace(run)
    seeds = f"one of {', '.join(map(str, trace.seeds))}"
    require(seed is None or seed in trace.seeds, "--seed", seed, seeds)
    return trace


def _checkpoint_of(scenario: str, file: Path, source: int, seed: int | None) -> Trace:
    """A trace in memory with the weights in a file, as if a run on a benchmark had left them."""
    config = resolve(scenario, "sgd")
    names = tuple(f"task {t + 1}" for t in range(config.tasks))
    accuracy = np.full((1, len(names), len(names)), np.nan)
    trace = Trace(scenario, "sgd", (seed or 0,), names, accuracy, config.as_dict())
    try:
        trace.keep_weights(seed or 0, source - 1, load_file(file))
    except (OSError, SafetensorError) as error:
        raise TraceError(f"--checkpoint {file} cannot be read: {error}") from error
    return trace


def _check_task(argument: str, task: int, trace: Trace, tasks: Scenario | None, whose: str) -> None:
    """Require a task that there is, and that the network has outputs for.

    Where all tasks of a benchmark share the outputs, there are tasks after the run's last one.
    """
    count = len(trace.tasks) if tasks is None else tasks.n_tasks
    if tasks is None and not grows_with_tasks(trace.scenario, trace.config.get("setting", "")):
        require(task >= 1, argument, task, "a task, from 1 on")
    elif not 1 <= task <= count:
        counted = "1 task" if count == 1 else f"{count} tasks"
        way_out = f"{argument} must be from 1 to {count}, not {task}"
        if count == 1:
            way_out = "there is no task to come"
        raise ConfigError(f"{whose} has {counted} and its network no outputs for others: {way_out}")


def _method_of(name: str, trace: Trace, own: dict[str, Any]) -> Method[Any]:
    """A method with the run's settings where they apply, then its preset, then its defaults."""
    known = method_options(name)
    preset = resolve(trace.scenario, name).options if trace.scenario in SCENARIOS else {}
    of_run = {key: value for key, value in trace.config.items() if key in known}
    return build_method(name, {**preset, **of_run, **own})


def _samples(scenario: str) -> int:
    """How many samples PCA-OGD computes the features of."""
    if scenario not in SCENARIOS:
        return PCAOGD.samples
    return int(resolve(scenario, "pca-ogd").options["samples"])


def _table(now: Prediction, rows: dict[str, Prediction], known: Task, coming: Task) -> Table:
    """Accuracies now and after learning the target in several ways."""
    table = Table(title=f"After learning {coming.name}: accuracy, %")
    table.add_column("", style="bold")
    table.add_column(f"on {known.name}", justify="right")
    table.add_column("change", justify="right")
    table.add_column(f"on {coming.name}", justify="right")
    before = now.source_accuracy or 0.0
    table.add_row("now", f"{before:.1f}", "", f"{now.target_accuracy:.1f}")
    for name, predicted in rows.items():
        after: Any = predicted.source_accuracy
        on_target = f"{predicted.target_accuracy:.1f}"
        table.add_row(name, f"{after:.1f}", f"{after - before:+.1f}", on_target)
    return table


def _most_at_risk(result: Effect) -> str:
    """The classes that lose most."""
    changes = {c: after - before for c, (before, after) in result.by_class().items()}
    losers = sorted((c for c in changes if changes[c] < 0), key=changes.__getitem__)[:3]
    return ", ".join(f"{c} ({changes[c]:+.1f})" for c in losers) or "none"


def _show(result: Forecast, known: Task, coming: Task, method: str) -> None:
    console = Console(highlight=False)
    console.print(_table(result.now, {method: result.after}, known, coming))
    console.print(f"Classes most at risk: {_most_at_risk(result)}")
    run = result.run
    console.print(
        f"A copy took {run.steps:,} of {run.of:,} steps at {run.rate:g} times the learning rate"
    )
    if result.covered < _NEARLY_ALL:
        console.print(
            f"A larger rate is unstable, so it covered {result.covered:.0%} of the training: "
            "expect more change than this"
        )


def _show_linearised(result: LinearisedForecast, known: Task, coming: Task) -> None:
    rows = {"plain SGD": result.after}
    rows |= {f"PCA-OGD, {p.components} directions": p for p in result.protected}
    console = Console(highlight=False)
    console.print(_table(result.now, rows | dict(result.methods), known, coming))
    console.print(f"Classes most at risk under plain SGD: {_most_at_risk(result)}")
    console.print(
        f"Overlap of the tasks: largest singular value {result.overlap[0]:.3f}, "
        f"mean {result.overlap.mean():.3f}"
    )
    word = "can be relied on" if result.trusted else "DO NOT rely on this forecast"
    console.print(f"Trust {result.trust:.2f}: {word} (limit {TRUSTED})")
