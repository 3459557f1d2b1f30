"""Networks and learners for a scenario, checked against it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from forgetless.data import Scenario
from forgetless.methods import Method
from forgetless.subspace import STORAGES, Storage
from forgetless.subspace.footprint import budget_of
from forgetless.support.errors import ConfigError, first_line, require
from forgetless.support.layout import is_under
from forgetless.support.streams import global_stream
from forgetless.tangent.evaluation import eval_mode
from forgetless.training.learner import Learner
from forgetless.training.models import HEAD, ModelFactory, ModelOptions
from forgetless.training.network import Network
from forgetless.training.settings import Training

ModelSource = nn.Module | Callable[[], nn.Module]


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
    first = scenario.task(0, seeds).train
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
            require(bool(found), argument, start, accepted)
            trained = not all(is_under(name, prefixes["freeze"]) for name in found)
            accepted = "what is trained, and freeze says that it is not"
            require(trained or argument != "unprotected", argument, start, accepted)


def make_model(model: ModelSource, seed: int) -> nn.Module:
    """A fresh network for a seed."""
    with global_stream(seed, "initial weights"):
        try:
            made = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        except (RuntimeError, MemoryError) as error:
            reason = first_line(error)
            raise ConfigError(f"the model cannot be made: {reason}") from error
    require(
        isinstance(made, nn.Module), "model", made, "a torch.nn.Module or a function making one"
    )
    return made


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
