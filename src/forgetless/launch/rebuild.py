"""A run made again from its trace: tasks, settings, network, and the method's effect on steps."""

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from forgetless.data import SCENARIOS, Scenario, ScenarioOptions, Split, Task, build_scenario
from forgetless.linalg import Layout, is_under
from forgetless.methods import Method
from forgetless.methods.state import take_step
from forgetless.support.plugins import PluginKind, installed, load_object
from forgetless.support.progress import bar_on_terminal
from forgetless.support.validation import ConfigError, ForgetlessWarning, TraceError, select_options
from forgetless.theory import SourceAndTarget, TangentModel
from forgetless.trace import Trace, tasks_learned
from forgetless.training.build import head_of, layers_fingerprint, make_learner, task_fingerprint
from forgetless.training.forecasting import SHARE_OF_STEPS, Forecast, dry_run, effect, evenly
from forgetless.training.learner import Learner
from forgetless.training.models import MODELS, ModelFactory, ModelOptions, ModelSource, make_model
from forgetless.training.settings import Training

FromScript = tuple[Scenario | None, ModelSource | None]  # tasks and model of a script
_CHUNK = 1000  # test samples evaluated at once
_ROUNDING = 0.5  # points by which another device may measure another accuracy
_SCRIPT = "a function of the script, --from SCRIPT.py:FUNCTION, that returns"


@final
@dataclass(frozen=True)
class Rebuilt:
    """What a run was made with.

    Attributes:
        tasks: its tasks.
        model: the network or a function that makes it, with any weights.
        training: the settings of its training.
        heads: how the names of the last layer's parameters begin, if the run named it.
    """

    tasks: Scenario
    model: ModelSource
    training: Training
    heads: tuple[str, ...]

    def network(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """The network with these weights; frozen parameters take no gradient."""
        module = make_model(self.model, seed=0)
        try:
            module.load_state_dict(dict(weights))
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"the weights do not fit the model of the run: {reason}") from error
        for name, parameter in module.named_parameters():
            frozen = is_under(name, self.training.prefixes["freeze"])
            parameter.requires_grad_(parameter.requires_grad and not frozen)
        return module

    def out_of_reach(self, module: nn.Module) -> list[str]:
        """The parameters that are trained but not projected, such as heads."""
        heads = self.heads if self.tasks.has_heads else ()
        if self.tasks.has_heads and not heads:
            few = self.tasks.task(0, (0,)).train.subset(torch.arange(2))
            heads = head_of(module, samples_of(few)[0], self.tasks.n_outputs)
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        return [n for n in trained if is_under(n, self.training.prefixes["unprotected"] + heads)]


def rebuild(
    trace: Trace,
    *,
    tasks: Scenario | None = None,
    model: ModelSource | None = None,
    data: Path | None = None,
    n_tasks: int = 0,
    download: bool = False,
) -> Rebuilt:
    """What a run was made with: from its configuration, or as it is given where a script made it.

    Nothing that a trace names is imported.

    Arguments:
        trace: the run's.
        tasks, model: as `fit` took them, for runs with tasks or a model of a script's own; they
            are checked against the run's fingerprints. A model with other layers or code must
            reproduce the run's accuracies.
        data: folder to look for datasets in first.
        n_tasks: how many tasks are needed, if a benchmark is to have more than the run learned.
        download: fetch a benchmark's dataset if it is not on disk.
    """
    where = str(trace.path) if trace.path is not None else "the run"
    config = trace.config
    if tasks is None or model is None:
        _check_given(where, config, tasks, model)
    if tasks is None:
        options = {"tasks": max(n_tasks, len(trace.tasks))}
        chosen = select_options(ScenarioOptions, config | options)
        tasks = build_scenario(str(config["scenario"]), chosen, data, download=download)
    else:
        _check_tasks(where, trace, tasks)
    given = model is not None
    if model is None:
        model = ModelFactory(
            select_options(ModelOptions, config), tasks.input_shape, tasks.n_outputs
        )
    heads = tuple(part for part in str(config.get("heads", "")).split(",") if part)
    made = Rebuilt(tasks, model, select_options(Training, config), heads)
    if given and layers_fingerprint(make_model(model, seed=0)) != trace.fingerprint.get("model"):
        _check_model(where, trace, made)
    return made


def load_from_script(text: str) -> FromScript:
    """Tasks and model from a script's function, "script.py:make".

    Arguments:
        text: the function. It takes no arguments and returns a Scenario, a model (a network or a
            function that makes one), or both.
    """
    made = load_object(text, "--from")
    if callable(made) and not isinstance(made, nn.Module | Scenario):
        try:
            made = made()
        except Exception as error:
            raise ConfigError(
                f"--from {text} cannot be called: {type(error).__name__}: {error}"
            ) from error
    parts = made if isinstance(made, tuple) else (made,)
    tasks = [part for part in parts if isinstance(part, Scenario)]
    models = [p for p in parts if isinstance(p, nn.Module) or (callable(p) and p not in tasks)]
    if not parts or len(tasks) > 1 or len(models) > 1 or len(tasks) + len(models) < len(parts):
        kinds = ", ".join(type(part).__name__ for part in parts) or "nothing"
        raise ConfigError(
            f"--from {text} must return tasks (a Scenario), a model, or both, not {kinds}"
        )
    return (tasks[0] if tasks else None), (models[0] if models else None)


def samples_of(split: Split) -> tuple[Tensor, Tensor]:
    """All samples as the first seed sees them: inputs (n, *) and labels (n,)."""
    if split.orders is None:
        return split.inputs, split.labels
    inputs, labels = split.take(torch.arange(len(split)).unsqueeze(0))
    return inputs[0], labels[0]


def _check_given(
    where: str, config: Mapping[str, Any], tasks: Scenario | None, model: ModelSource | None
) -> None:
    """Reject a run whose tasks or model only its script can make, and that are not given."""
    lacking = {}
    if tasks is None and _is_unknown("scenario", config, SCENARIOS):
        lacking["tasks"] = "tasks"
    if model is None and _is_unknown("model", {"model": "mlp", **config}, MODELS):
        lacking["model"] = f"a model ({config.get('model_from', config.get('model'))})"
    if lacking:
        raise TraceError(
            f"{where} was trained with {' and '.join(lacking.values())} of a script's own: give "
            f"{' and '.join(f'{name}=…' for name in lacking)}, or on the command line {_SCRIPT} "
            f"{' and '.join(lacking)}"
        )


def _is_unknown(kind: PluginKind, config: Mapping[str, Any], builtin: Collection[str]) -> bool:
    """Whether a run's scenario or model is neither built in nor an installed plug-in."""
    name = config.get(kind)
    return f"{kind}_from" in config or not (name in builtin or name in installed(kind))


def _check_tasks(where: str, trace: Trace, tasks: Scenario) -> None:
    """Reject tasks that are not those of the run."""
    known = trace.fingerprint.get("data", [])
    if tasks.n_tasks < len(known):
        raise ConfigError(f"{where} learned {len(known)} tasks, and tasks has {tasks.n_tasks}")
    for t, expected in enumerate(known):
        if task_fingerprint(tasks.task(t, trace.seeds[:1])) != expected:
            raise ConfigError(f"tasks are not those of {where}: the data of task {t + 1} differ")


def _check_model(where: str, trace: Trace, made: Rebuilt) -> None:
    """Reject a model that with the run's weights has other accuracies than the run."""
    differ = f"the model given is not the one that {where} was trained with: its layers or code"
    row = int(np.argmax(trace.finished))
    learned, seed = tasks_learned(trace.accuracy[row]), trace.seeds[row]
    if learned == 0:
        if trace.fingerprint:
            raise ConfigError(f"{differ} differ")
        return  # weights of a file: nothing is known of their model
    tests = [samples_of(made.tasks.task(s, [seed]).test) for s in range(learned)]
    for t in range(learned):
        module = made.network(trace.weights(seed, t)).eval()
        for s in range(t + 1):
            found = _accuracy(module, *tests[s], made.tasks.competing(s, t))
            recorded = float(trace.accuracy[row, t, s])
            if not abs(found - recorded) < _ROUNDING:
                raise ConfigError(
                    f"{differ} differ, and with the weights after task {t + 1} its accuracy on "
                    f"task {s + 1} is {found:.1f} %, not {recorded:.1f} %"
                )
    warnings.warn(
        f"{differ} differ, but with the run's weights it has the run's accuracies",
        ForgetlessWarning,
        stacklevel=3,
    )


def _accuracy(module: nn.Module, inputs: Tensor, labels: Tensor, classes: range) -> float:
    """The share of samples that are classified correctly among the classes, in percent."""
    like = next(module.parameters())
    with torch.no_grad():
        outputs = torch.cat([module(some.to(like)) for some in inputs.split(_CHUNK)])
    right = outputs[:, classes.start : classes.stop].argmax(1) + classes.start == labels
    return 100 * float(right.double().mean())


def method_step(
    rebuilt: Rebuilt,
    method: Method[Any],
    trace: Trace,
    seed: int,
    learned: int,
    device: torch.device | None = None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """What a method makes of a step of SGD, once it has consolidated the first tasks of a run.

    The result takes a step and the weights before it, (p,) each, over all trained parameters in the
    model's order, and returns the step that is taken. It keeps the method's state from call to
    call.

    Arguments:
        rebuilt: what the run was made with.
        method: any method that does not need the batch of a step.
        trace: of the run, with the weights after each of those tasks.
        seed: of the trace.
        learned: number of tasks.
    """
    if method.needs_batch:
        raise ConfigError(
            f"{method.name} needs the batch of every step, which a forecast does not have"
        )
    learner = _learner_of(rebuilt, method, seed, device or torch.device("cpu"))
    network, view = learner.network, learner.view
    for _ in _consolidated(learner, rebuilt, trace, seed, learned):
        pass
    view.task = learned
    network.module.eval()
    state, size = learner.state, network.protected_size
    inside = Layout({name: tuple(shape) for name, shape in network.shapes.items()})
    in_order = [n for n, _ in network.module.named_parameters() if n in network.shapes]
    outside = Layout({name: inside.shapes[name] for name in in_order})

    def taken(step: Tensor, theta: Tensor) -> Tensor:
        nonlocal state
        network.theta.copy_(inside.join(outside.split(theta.unsqueeze(0))))
        g = inside.join(outside.split(step.unsqueeze(0))).to(network.theta)
        protected, state = take_step(method, g[:, :size], state, view)
        free = g[:, size:] if method.trains_heads(state) else torch.zeros_like(g[:, size:])
        found = outside.join(inside.split(torch.cat([protected, free], 1)))
        return found[0].to(step)

    return taken


def forecast_run(
    rebuilt: Rebuilt,
    method: Method[Any],
    trace: Trace,
    seed: int,
    source: int,
    target: int,
    *,
    share: float = SHARE_OF_STEPS,
    device: torch.device | None = None,
) -> Forecast:
    """What learning another task does to a learned one, by a dry run with the run's settings.

    Arguments:
        rebuilt: what the run was made with; its `training` is that of the target.
        method: with which the target is learned; it consolidates the tasks up to the source first,
            each at the weights that the run had after it.
        trace: of the run.
        seed: of the trace.
        source, target: the tasks, from 0.
        share: of the steps that the copy takes.
    """
    tasks, training = _OnHand(rebuilt.tasks), rebuilt.training
    rebuilt = replace(rebuilt, tasks=tasks)
    where = device or torch.device("cpu")
    weights = trace.weights(seed, source)
    state = None
    if method.protects:
        knowing = _learner_of(rebuilt, method, seed, where)
        for _ in _consolidated(knowing, rebuilt, trace, seed, source + 1):
            pass
        state = knowing.state
    known, coming = (tasks.task(t, [seed]) for t in (source, target))
    a_task = training.epochs * math.ceil(len(known.train) / training.batch_size)

    def make(settings: Training) -> Learner:
        heads = rebuilt.heads or None
        learner = make_learner(tasks, method, rebuilt.model, (seed,), settings, heads, where)
        learner.network.load_state_dict(0, weights)
        learner.state = learner.state if state is None else state
        learner.steps = a_task * (source + 1)
        return learner

    tasks.task(0, (seed,))
    started = time.perf_counter()
    model = rebuilt.network(weights).to(where, getattr(torch, training.dtype)).eval()
    classes = tasks.competing(source, target), tasks.competing(target)
    shown = samples_of(coming.train.subset(evenly(len(coming.train))))
    problem = SourceAndTarget(TangentModel(model), samples_of(known.test), shown, None, *classes)
    with bar_on_terminal("forecast"):
        run = dry_run(make, coming.train, target, training, share, seed)
    return effect(problem, model, run, started)


@final
class _OnHand(Scenario):
    """Tasks of a scenario that are made once for the same seeds."""

    def __init__(self, tasks: Scenario) -> None:
        self._tasks = tasks
        self._made: dict[tuple[int, ...], Task] = {}
        self.name, self.setting, self.n_tasks = tasks.name, tasks.setting, tasks.n_tasks
        self.input_shape, self.n_outputs = tasks.input_shape, tasks.n_outputs

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        """The task."""
        key = index, *seeds
        if key not in self._made:
            self._made[key] = self._tasks.task(index, seeds)
        return self._made[key]

    def classes(self, index: int) -> range:
        """Its outputs."""
        return self._tasks.classes(index)


def projections(
    rebuilt: Rebuilt,
    method: Method[Any],
    trace: Trace,
    seed: int,
    learned: int,
    names: Sequence[str],
) -> list[Callable[[Tensor], Tensor]]:
    """T of each task of a run, as it was when the task started: rows (n, p) → (n, p).

    Arguments:
        rebuilt, trace, seed: as for `method_step`.
        method: one with `keeps_directions`.
        learned: number of tasks.
        names: the parameters that it protects, in the order of the rows.
    """
    learner = _learner_of(rebuilt, method, seed, torch.device("cpu"))
    theta = learner.network.protected
    shapes = learner.network.shapes
    inside = Layout({name: tuple(shapes[name]) for name in learner.network.protected_names})
    outside = Layout({name: inside.shapes[name] for name in names})

    def without(directions: Any) -> Callable[[Tensor], Tensor]:
        def taken(rows: Tensor) -> Tensor:
            g = inside.join(outside.split(rows)).to(theta)
            left = torch.cat([directions.project_out(one) for one in g.split(1)])
            return outside.join(inside.split(left)).to(rows)

        return taken

    found = [without(learner.state)]
    found += map(without, _consolidated(learner, rebuilt, trace, seed, learned - 1))
    return found


def _learner_of(rebuilt: Rebuilt, method: Method[Any], seed: int, device: torch.device) -> Learner:
    """A learner with the settings of a run, before its first task."""
    heads = rebuilt.heads or None
    return make_learner(
        rebuilt.tasks, method, rebuilt.model, (seed,), rebuilt.training, heads, device
    )


def _consolidated(
    learner: Learner, rebuilt: Rebuilt, trace: Trace, seed: int, learned: int
) -> Iterator[Any]:
    """The method's state after each of the first tasks, at the weights that the run had then."""
    network = learner.network
    for task in range(learned):
        network.load_state_dict(0, trace.weights(seed, task))
        learner.view.task = task
        split = rebuilt.tasks.task(task, (seed,)).train
        learner.consolidate(split.to(network.theta.device, network.theta.dtype), task)
        yield learner.state
