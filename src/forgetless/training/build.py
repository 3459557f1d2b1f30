"""Networks and learners for a scenario: what is there before the first step."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from forgetless.data import Scenario
from forgetless.methods import AGEM, Method
from forgetless.subspace import STORAGES, Storage
from forgetless.support.errors import ConfigError, require
from forgetless.support.streams import global_stream
from forgetless.training.learner import Learner
from forgetless.training.models import HEAD, ModelOptions, build_model
from forgetless.training.network import Network
from forgetless.training.settings import Training

ModelSource = nn.Module | Callable[[], nn.Module]


def seed_groups(
    seeds: tuple[int, ...], training: Training, device: torch.device, module: nn.Module
) -> list[tuple[int, ...]]:
    """The seeds that train together in one batched program."""
    together = training.seeds_together or (len(seeds) if device.type == "cuda" else 1)
    # What dropout draws for a seed would depend on the seeds beside it.
    if any(isinstance(m, _DropoutNd) for m in module.modules()):
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
        storage: how the method keeps directions, if not as the training says.
    """
    modules = [make_model(model, scenario, seed) for seed in seeds]
    heads = (heads,) if isinstance(heads, str) else heads
    last = tuple(heads) if heads is not None else _last_layer(modules[0])
    beginnings = training.beginnings | {"heads": last}
    _check_names(beginnings, [name for name, _ in modules[0].named_parameters()])
    if beginnings["unprotected"] and isinstance(method, AGEM) and method.heads == "released":
        raise ConfigError(
            "A-GEM with released heads trains nothing out of its reach after the first task, so "
            "nothing can be left unprotected"
        )
    has_heads = scenario.has_heads and not method.reaches_heads
    free = beginnings["unprotected"] + (last if has_heads else ())
    active = torch.zeros(scenario.n_tasks, scenario.n_outputs, dtype=torch.bool)
    for t in range(scenario.n_tasks):
        active[t, scenario.classes(t)] = True
    network = Network(
        modules,
        active,
        is_free=lambda name: name.startswith(free),
        is_frozen=lambda name: name.startswith(beginnings["freeze"]),
        device=device,
        dtype=getattr(torch, training.dtype),
    )
    first = scenario.task(0, seeds).train
    few = torch.arange(min(2, len(first))).expand(len(seeds), -1)
    network.check_outputs(first.take(few)[0].to(network.theta))
    return Learner(
        network,
        method,
        scenario,
        seeds,
        batch_size=training.batch_size,
        lr=training.lr,
        eval_mode_after=training.eval_mode_after,
        storage=storage or STORAGES[training.storage],
    )


def _check_names(beginnings: Mapping[str, tuple[str, ...]], names: Sequence[str]) -> None:
    """Refuse beginnings of names that no parameter has, and what is frozen and trained at once."""
    for argument, starts in beginnings.items():
        for start in starts:
            found = [name for name in names if name.startswith(start)]
            accepted = "the beginning of a parameter's name in the model"
            require(bool(found), argument, start, accepted)
            trained = not all(name.startswith(beginnings["freeze"]) for name in found)
            accepted = "what is trained, and freeze says that it is not"
            require(trained or argument != "unprotected", argument, start, accepted)


def make_model(model: ModelSource | None, scenario: Scenario, seed: int) -> nn.Module:
    """A fresh network for a seed."""
    with global_stream(seed, "initial weights"):
        try:
            if model is None:
                made = build_model(ModelOptions(), scenario.input_shape, scenario.n_outputs)
            else:
                made = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        except (RuntimeError, MemoryError) as error:
            reason = str(error).splitlines()[0] if str(error) else "not enough memory"
            raise ConfigError(f"the model cannot be made: {reason}") from error
    require(
        isinstance(made, nn.Module), "model", made, "a torch.nn.Module or a function making one"
    )
    return made


def _last_layer(module: nn.Module) -> tuple[str, ...]:
    """What the names of the last layer's parameters start with."""
    names = [name for name, _ in module.named_parameters()]
    if any(name.startswith(f"{HEAD}.") for name in names):
        return (f"{HEAD}.",)
    return (names[-1][: names[-1].rfind(".") + 1] or names[-1],) if names else ()
