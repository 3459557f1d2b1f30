"""The description of a run in its trace: a flat configuration, and fingerprints of its parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from forgetless.data import Scenario, Task
from forgetless.data.tasks import own_settings
from forgetless.methods import METHODS, Method, method_settings
from forgetless.support.plugins import code_of, import_path, load_object
from forgetless.trace.experiment import (
    INCIDENTAL,
    digest_of,
    plain,
)
from forgetless.training.build import ModelFactory, model_settings
from forgetless.training.settings import Training

Settings = dict[str, Any]
_MOST_SAMPLES = 200  # of a task that its fingerprint takes in


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
