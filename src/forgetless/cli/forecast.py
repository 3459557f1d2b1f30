"""The command `forgetless forecast`: what the next task will do, before it is trained on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from forgetless.data import SCENARIOS, Task, build_scenario, grows_with_tasks
from forgetless.launch.config import Config, resolve
from forgetless.launch.rebuild import network_of, out_of_reach, samples_of, settings_of
from forgetless.support.errors import ConfigError, TraceError, require
from forgetless.theory import TRUSTED, Forecast, forecast
from forgetless.trace import load_trace, nulls
from forgetless.training.fit import resolve_device


def forecast_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder of a trace; with --checkpoint, a scenario.")
    ],
    source: Annotated[
        int, typer.Option("--source", metavar="N", help="Task that is known, from 1; its weights.")
    ] = 1,
    target: Annotated[
        int | None,
        typer.Option("--target", metavar="N", help="Task to come.  [default: source + 1]"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seed of the trace.  [default: first]")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="Weights of the scenario's model, as safetensors."),
    ] = None,
    components: Annotated[
        str, typer.Option("--components", help="Numbers of directions to try with PCA-OGD.")
    ] = "25,50,100,200",
    lr: Annotated[
        float | None, typer.Option("--lr", metavar="X", help="Learning rate.  [default: the run's]")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option("--epochs", metavar="N", help="Passes over the task.  [default: the run's]"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and larger steps.")] = False,
    data: Annotated[Path | None, typer.Option("--data", help="Folder with datasets.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, …")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the forecast as JSON.")] = False,
) -> None:
    """Predict what learning the next task will do to one that is known.

    A copy of the network takes the first tenth of the steps, its linearisation the others; how well
    the one follows the other says how far the forecast can be trusted.
    """
    target = source + 1 if target is None else target
    config, weights, number = _start(run, checkpoint, source, seed)
    for name, task in (("--source", source), ("--target", target)):
        _check_task(name, task, config, "the run" if checkpoint is None else config.scenario)
    require(source != target, "--target", target, "another task than --source")
    tasks = build_scenario(config.scenario, _long_enough(config, source, target), data)
    model = network_of(config, tasks, weights)
    model.to(resolve_device(device))
    counts = [part.strip() for part in components.split(",") if part.strip()]
    numeric = all(c.isascii() and c.isdigit() and int(c) > 0 for c in counts)
    require(numeric, "--components", components, "counts such as 25,100")
    known, coming = (tasks.task(t - 1, [number]) for t in (source, target))
    console = Console(stderr=True)
    with console.status("forecast") as status:
        result = forecast(
            model,
            samples_of(known.test),
            samples_of(coming.train),
            lr=lr if lr is not None else config.lr,
            epochs=epochs if epochs is not None else config.epochs,
            batch_size=config.batch_size,
            source_classes=tasks.classes(source - 1),
            target_classes=tasks.classes(target - 1),
            components=[int(c) for c in counts],
            remember=samples_of(known.train),
            samples=resolve(config.scenario, "pca-ogd").options["samples"],
            exclude=out_of_reach(config, tasks, model),
            quick=quick,
            seed=number,
            observer=status.update,
        )
    if as_json:
        names = {"scenario": config.scenario, "source": source, "target": target, "seed": number}
        typer.echo(json.dumps(nulls(names | result.summary()), allow_nan=False))
    else:
        _show(result, known, coming)


def _start(
    run: str, checkpoint: Path | None, source: int, seed: int | None
) -> tuple[Config, dict[str, Tensor], int]:
    """Configuration, weights after the source task, and seed: from a trace or from a file."""
    if checkpoint is not None:
        config = resolve(run, "sgd")
        try:
            return config, dict(load_file(checkpoint)), seed or 0
        except (OSError, SafetensorError) as error:
            raise TraceError(f"--checkpoint {checkpoint} cannot be read: {error}") from error
    if run in SCENARIOS and not Path(run).exists():
        raise ConfigError(f"{run} is a scenario: add --checkpoint FILE, or name a run's folder")
    trace = load_trace(run)
    config = settings_of(trace)
    number = trace.seeds[0] if seed is None else seed
    require(number in trace.seeds, "--seed", number, f"one of {', '.join(map(str, trace.seeds))}")
    learned = f"a task that the run has learned, from 1 to {len(trace.tasks)}"
    require(1 <= source <= len(trace.tasks), "--source", source, learned)
    return config, trace.weights(number, source - 1), number


def _check_task(argument: str, task: int, config: Config, whose: str) -> None:
    """Require a task that there is, and that the network has outputs for.

    Where all tasks share the outputs, those after the last one of the run are as good.
    """
    if not grows_with_tasks(config.scenario):
        require(task >= 1, argument, task, "a task, from 1 on")
    elif not 1 <= task <= config.tasks:
        count = "1 task" if config.tasks == 1 else f"{config.tasks} tasks"
        way_out = f"{argument} must be from 1 to {config.tasks}, not {task}"
        if config.tasks == 1:
            way_out = "there is no task to come"
        raise ConfigError(f"{whose} has {count} and its network no outputs for others: {way_out}")


def _long_enough(config: Config, source: int, target: int) -> Config:
    """The run's settings with as many tasks as are spoken of: the one to come may be new."""
    return replace(config, tasks=max(config.tasks, source, target))


def _show(result: Forecast, known: Task, coming: Task) -> None:
    table = Table(title=f"After learning {coming.name}: accuracy, %")
    table.add_column("", style="bold")
    table.add_column(f"on {known.name}", justify="right")
    table.add_column("change", justify="right")
    table.add_column(f"on {coming.name}", justify="right")
    now = result.now.source_accuracy or 0.0
    table.add_row("now", f"{now:.1f}", "", f"{result.now.target_accuracy:.1f}")
    for outlook in (result.plain, *result.protected):
        name = f"PCA-OGD, {outlook.components} directions" if outlook.components else "plain SGD"
        after: Any = outlook.source_accuracy
        table.add_row(name, f"{after:.1f}", f"{after - now:+.1f}", f"{outlook.target_accuracy:.1f}")
    console = Console()
    console.print(table)
    changes = {c: after - before for c, (before, after) in result.by_class().items()}
    losers = sorted((c for c in changes if changes[c] < 0), key=changes.__getitem__)[:3]
    worst = ", ".join(f"{c} ({changes[c]:+.1f})" for c in losers) or "none"
    console.print(f"Classes most in danger under plain SGD: {worst}", highlight=False)
    console.print(
        f"Overlap of the tasks: largest singular value {result.overlap[0]:.3f}, "
        f"mean {result.overlap.mean():.3f}",
        highlight=False,
    )
    word = "can be relied on" if result.trusted else "DO NOT rely on this forecast"
    console.print(f"Trust {result.trust:.2f}: {word} (limit {TRUSTED})", highlight=False)
