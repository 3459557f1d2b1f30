"""A run made: the learner of a scenario, and the description of the run.

All heads of a task sequence are one last layer, named `HEAD`. A head per task is a slice of its
outputs: a sample of task t uses the logits of task t's classes alone. The description in a trace is
a flat configuration, and fingerprints of the run's parts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from forgetless.data import Scenario, Task
from forgetless.data.scenarios import own_settings
from forgetless.linalg import is_under
from forgetless.methods import METHODS, Method, method_settings
from forgetless.subspace import STORAGES, Storage
from forgetless.subspace.storage import budget_of
from forgetless.support.plugins import (
    code_of,
    import_path,
    load_object,
)
from forgetless.support.provenance import digest_of
from forgetless.support.validation import (
    ConfigError,
    beginnings,
    require,
)
from forgetless.tangent.evaluation import eval_mode
from forgetless.trace.experiment import INCIDENTAL, plain
from forgetless.training.learner import Learner
from forgetless.training.models import (
    HEAD,
    ModelFactory,
    ModelOptions,
    ModelSource,
    make_model,
    model_settings,
)
from forgetless.training.network import Network
from forgetless.training.settings import Training

_MOST_SAMPLES = 200  # of a task that its fingerprint takes in


def seed_groups(
    seeds: tuple[int, ...], training: Training, device: torch.device, module: nn.Module
) -> list[tuple[int, ...]]:
    """Groups of seeds that train together in one batched program."""
    together = training.seeds_together or (len(seeds) if device.type == "cuda" else 1)
    # Dropout draws for all seeds of a group from one generator.
    random = any(isinstance(m, _DropoutNd) for m in module.modules())
    if random or training.trains_one_seed:
        together = 1
    return [seeds[i : i + together] for i in range(0, len(seeds), together)]


def make_learner(
    scenario: Scenario,
    method: Method[Any],
    model: ModelSource | None,
    seeds: Sequence[int],
    training: Training,
    heads: Sequence[str] | None,
    device: torch.device,
    storage: Storage | None = None,
) -> Learner:
    """Networks for a group of seeds, checked against the scenario, and their learner.

    Arguments:
        storage: how the method stores directions, if not as `training` says.
    """
    if model is None:
        model = ModelFactory(ModelOptions(), scenario.input_shape, scenario.n_outputs)
    modules = [make_model(model, seed) for seed in seeds]
    first = scenario.checked_task(0, seeds).train
    few = torch.arange(min(2, len(first))).expand(len(seeds), -1)
    inputs = first.take(few)[0]
    has_heads = scenario.has_heads and not method.reaches_heads
    if heads is not None:
        last = (heads,) if isinstance(heads, str) else tuple(heads)
    else:
        last = head_of(modules[0], inputs[0], scenario.n_outputs) if has_heads else ()
    prefixes = training.prefixes | {"heads": last}
    _check_names(prefixes, [name for name, _ in modules[0].named_parameters()])
    title = method.label or method.name
    if prefixes["unprotected"] and not method.may_leave_unprotected:
        raise ConfigError(
            f"{title} trains nothing out of its reach after the first task, "
            "so nothing can be left unprotected"
        )
    if scenario.setting == "class" and method.needs_own_heads:
        raise ConfigError(
            f"{title} with these options needs a head for each task, and in the setting class "
            "tasks share one"
        )
    free = prefixes["unprotected"] + (last if has_heads else ())
    active = torch.zeros(scenario.n_tasks, scenario.n_outputs, dtype=torch.bool)
    for t in range(scenario.n_tasks):
        active[t, scenario.competing(t)] = True
    network = Network(
        modules,
        active,
        is_free=lambda name: is_under(name, free),
        is_frozen=lambda name: is_under(name, prefixes["freeze"]),
        device=device,
        dtype=getattr(torch, training.dtype),
    )
    network.check_outputs(inputs.to(network.theta))
    budget = None
    if training.budget and method.keeps_directions and method.demand() is None:
        budget = int(budget_of(device, training.budget))
    return Learner(
        network,
        method,
        scenario,
        seeds,
        training,
        storage or STORAGES[training.storage],
        budget,
    )


def _check_names(prefixes: Mapping[str, tuple[str, ...]], names: Sequence[str]) -> None:
    """Reject prefixes that match no parameter, and parameters both frozen and unprotected."""
    for argument, starts in prefixes.items():
        for start in starts:
            found = [name for name in names if is_under(name, [start])]
            accepted = "the beginning of a parameter's name in the model"
            require(bool(found), argument, start, accepted, beginnings(names))
            trained = not all(is_under(name, prefixes["freeze"]) for name in found)
            accepted = "what is trained, and freeze says that it is not"
            require(trained or argument != "unprotected", argument, start, accepted)


def head_of(module: nn.Module, inputs: Tensor, outputs: int) -> tuple[str, ...]:
    """The prefix of the parameters that make the outputs: those of the layer that runs last.

    Arguments:
        module: the network.
        inputs: a few samples, (n, *).
        outputs: of all tasks.
    """
    latest: list[tuple[str, Any]] = []
    layers = {n: m for n, m in module.named_modules() if any(True for _ in m.parameters(False))}
    if not layers:
        return ()

    def note(name: str) -> Callable[..., None]:
        return lambda layer, args, output: latest.append((name, output))

    handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    try:
        with eval_mode(module), torch.no_grad():
            made = module(inputs.to(next(module.parameters())))
    except (RuntimeError, ValueError, TypeError):
        return ()  # the check of its outputs says why
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(made, Tensor) or made.shape[1:] != (outputs,):
        return ()  # so does it here
    name, output = latest[-1] if latest else ("", None)
    if not isinstance(output, Tensor) or tuple(output.shape) != (len(inputs), outputs):
        raise ConfigError(
            f"cannot tell which layer produces the tasks' outputs: {name or 'the model'}, which "
            f"runs last, does not have {outputs} outputs for each sample; name the parameters of "
            f"the layers that do, such as heads=['{HEAD}.'], or on the command line --heads {HEAD}."
        )
    if name.startswith(f"{HEAD}."):
        return (f"{HEAD}.",)
    return (f"{name}.",) if name else tuple(n for n, _ in module.named_parameters())


Settings = dict[str, Any]


def describe(
    scenario: Scenario,
    method: Method[Any],
    model: nn.Module | Callable[[], nn.Module],
    module: nn.Module,
    training: Training,
    heads: Sequence[str] | None,
) -> tuple[Settings, Settings]:
    """The configuration and the fingerprints of a run, from what `fit` is given.

    Arguments:
        module: the network that the model makes.
    """
    tasks, network = _scenario_entries(scenario), _model_entries(model, module)
    config = flat_config(tasks, network, method, training)
    if heads is not None:
        config["heads"] = heads if isinstance(heads, str) else ",".join(heads)
    steps = {n: v for n, v in _training_entries(method, training).items() if n not in INCIDENTAL}
    own = _method_entries(method)
    given = isinstance(model, nn.Module)  # whose weights all seeds start from
    code = "" if given else code_of(model.maker if isinstance(model, ModelFactory) else model)
    fingerprint = {
        "scenario": digest_of(plain(tasks), code_of(type(scenario))),
        "data": [],
        "model": layers_fingerprint(module),
        "start": digest_of(code, *(module.state_dict().values() if given else ())),
        "method": digest_of(method.name, plain(own), _code_in(own), code_of(type(method))),
        "training": digest_of(plain(steps), _code_in(steps), config.get("heads")),
    }
    return config, fingerprint


def flat_config(
    scenario: Mapping[str, Any], model: Mapping[str, Any], method: Method[Any], training: Training
) -> Settings:
    """The settings that a run uses, by name, the same from Python and from the command line.

    Arguments:
        scenario, model: their names and options.
        method, training: as `fit` takes them.
    """
    others = {**model, **_training_entries(method, training)}
    config: Settings = {**scenario, "method": method.name}
    if METHODS.get(method.name) is not type(method):
        config["method_from"] = import_path(type(method))
        if method.label:
            config["method_label"] = method.label
        if method.family:
            config["method_family"] = method.family
    for setting, value in _method_entries(method).items():
        # A method of one's own may have an `lr` or a `model` too.
        taken = setting in config or setting in others
        config[f"{method.name}_{setting}" if taken else setting] = value
    return {name: plain(value) for name, value in (config | others).items()}


def layers_fingerprint(module: nn.Module) -> str:
    """A checksum of a network: names and shapes of its tensors, its layers and their code."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    shapes = {name: [list(t.shape), t.requires_grad] for name, t in tensors.items()}
    types = {type(m) for m in module.modules()}
    kinds = sorted({(kind.__qualname__, code_of(kind)) for kind in types})
    return digest_of(repr(module), shapes, kinds)


def task_fingerprint(task: Task) -> str:
    """A checksum of a task's samples: all labels, and up to 200 inputs."""
    parts = []
    for split in (task.train, task.test):
        count = min(len(split), _MOST_SAMPLES)
        some = torch.linspace(0, len(split) - 1, count).round().long()
        parts += [split.labels, split.inputs[some]]
    return digest_of(*parts)


def unused_by_method(method: type[Method[Any]] | Method[Any]) -> set[str]:
    """The settings of training that a method does not use."""
    unused = set() if method.keeps_directions else {"storage", "budget"}
    return unused | (set() if method.protects else {"unprotected"})


def _training_entries(method: Method[Any], training: Training) -> Settings:
    """The settings that have an effect; functions given as file.py:function are loaded."""
    unused = unused_by_method(method) | training.unused.keys()
    values = {f.name: getattr(training, f.name) for f in fields(Training) if f.name not in unused}
    for name in ("optimizer", "augmentation"):
        if isinstance(values[name], str) and ":" in values[name]:
            values[name] = load_object(values[name], name)
    return values


def _method_entries(method: Method[Any]) -> Settings:
    """The hyperparameters of a method without those that others replace."""
    own: Settings = method_settings(method) if is_dataclass(method) else {}
    replaced = {old for new, old in method.replaces.items() if own.get(new) is not None}
    return {setting: value for setting, value in own.items() if setting not in replaced}


def _code_in(settings: Settings) -> list[str]:
    """The code of the functions among settings."""
    return [code_of(value) for value in settings.values() if callable(value)]


def _scenario_entries(scenario: Scenario) -> Settings:
    named = {"scenario": scenario.name, "tasks": scenario.n_tasks}
    if scenario.recipe is not None:
        return named | dict(scenario.recipe)
    return named | own_settings(scenario, import_path(type(scenario)))


def _model_entries(model: nn.Module | Callable[[], nn.Module], module: nn.Module) -> Settings:
    if isinstance(model, ModelFactory):
        return model_settings(model.options)
    maker = model.func if isinstance(model, partial) else model
    return {"model": type(module).__name__, "model_from": import_path(maker)}
