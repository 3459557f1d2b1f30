"""The command `forgetless forecast`: the effect of the next task, before it is trained on."""

import json
import warnings
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file

from forgetless.cli.options import DataFolder, Script, Set, values_to_set
from forgetless.data import SCENARIOS, Scenario, Task, grows_with_tasks
from forgetless.launch.rebuild import Rebuilt, load_from_script, method_step, rebuild, samples_of
from forgetless.launch.runs import resolve
from forgetless.methods import PCAOGD, Method, build_method, method_options
from forgetless.support.validation import ConfigError, ForgetlessWarning, TraceError, require
from forgetless.theory import TRUSTED, Forecast, forecast
from forgetless.trace import Trace, load_trace, nulls
from forgetless.training.fit import resolve_device
from forgetless.training.settings import Training


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
            "--method", help="Also predict this method, such as ogd or your own, my_file.py:OWM."
        ),
    ] = "",
    to_set: Set = None,
    components: Annotated[
        str,
        typer.Option(
            "--components", help="Numbers of directions to try with PCA-OGD, comma-separated."
        ),
    ] = "25,50,100,200",
    lr: Annotated[
        float | None, typer.Option("--lr", metavar="X", help="Learning rate.  [default: the run's]")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option("--epochs", metavar="N", help="Passes over the task.  [default: the run's]"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and larger steps.")] = False,
    data: DataFolder = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, …")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the forecast as JSON.")] = False,
) -> None:
    """Predict what learning the next task will do to a learned one.

    A copy of the network takes the first tenth of the steps and its linearisation the rest; how
    well the one follows the other says how far the forecast can be trusted.
    """
    target = source + 1 if target is None else target
    if checkpoint is None:
        trace = _trace_of(run, seed)
    else:
        trace = _checkpoint_of(run, checkpoint, source, seed)
    number = trace.seeds[0] if seed is None else seed
    benchmark = None if checkpoint is None else run
    rebuilt = _rebuilt(trace, benchmark, source, target, script, data)
    tasks, training = rebuilt.tasks, rebuilt.training
    if not training.is_constant_sgd and lr is None:
        raise ConfigError(
            "a forecast is of plain SGD, and the run trained with another optimizer, schedule or "
            "augmentation: choose the learning rate of SGD with --lr"
        )
    model = rebuilt.network(trace.weights(number, source - 1)).to(resolve_device(device))
    counts = _counts(components)
    require(bool(method) or not to_set, "--set", to_set, "an option of --method, which is missing")
    methods = {}
    if method:
        chosen = _method_of(method, trace, values_to_set(to_set or [], [method])[method])
        methods[chosen.label or chosen.name] = method_step(rebuilt, chosen, trace, number, source)
    known, coming = (tasks.task(t - 1, [number]) for t in (source, target))
    result = forecast(
        model,
        samples_of(known.test),
        samples_of(coming.train),
        lr=lr if lr is not None else training.lr,
        epochs=epochs if epochs is not None else training.epochs,
        batch_size=training.batch_size,
        source_classes=tasks.competing(source - 1, target - 1),
        target_classes=tasks.competing(target - 1),
        components=counts,
        remember=samples_of(known.train),
        samples=_samples(trace.scenario),
        exclude=rebuilt.out_of_reach(model),
        methods=methods,
        quick=quick,
        seed=number,
    )
    _warn_of_other_training(training)
    if as_json:
        names = {"scenario": trace.scenario, "source": source, "target": target, "seed": number}
        typer.echo(json.dumps(nulls(names | result.summary()), allow_nan=False))
    else:
        _show(result, known, coming)


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


def _show(result: Forecast, known: Task, coming: Task) -> None:
    table = Table(title=f"After learning {coming.name}: accuracy, %")
    table.add_column("", style="bold")
    table.add_column(f"on {known.name}", justify="right")
    table.add_column("change", justify="right")
    table.add_column(f"on {coming.name}", justify="right")
    now = result.now.source_accuracy or 0.0
    table.add_row("now", f"{now:.1f}", "", f"{result.now.target_accuracy:.1f}")
    rows = {"plain SGD": result.plain}
    rows |= {f"PCA-OGD, {p.components} directions": p for p in result.protected}
    for name, predicted in (rows | dict(result.methods)).items():
        after: Any = predicted.source_accuracy
        on_target = f"{predicted.target_accuracy:.1f}"
        table.add_row(name, f"{after:.1f}", f"{after - now:+.1f}", on_target)
    console = Console()
    console.print(table)
    changes = {c: after - before for c, (before, after) in result.by_class().items()}
    losers = sorted((c for c in changes if changes[c] < 0), key=changes.__getitem__)[:3]
    worst = ", ".join(f"{c} ({changes[c]:+.1f})" for c in losers) or "none"
    console.print(f"Classes most at risk under plain SGD: {worst}", highlight=False)
    console.print(
        f"Overlap of the tasks: largest singular value {result.overlap[0]:.3f}, "
        f"mean {result.overlap.mean():.3f}",
        highlight=False,
    )
    word = "can be relied on" if result.trusted else "DO NOT rely on this forecast"
    console.print(f"Trust {result.trust:.2f}: {word} (limit {TRUSTED})", highlight=False)
