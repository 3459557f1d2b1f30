"""What a trace was made with, made again: its settings, its tasks, its network."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from forgetless.data import Scenario, Split, build_scenario
from forgetless.launch.config import Config, resolve
from forgetless.support.errors import ConfigError, TraceError
from forgetless.trace import Trace
from forgetless.training.models import HEAD, build_model


def settings_of(trace: Trace) -> Config:
    """The settings of a run that `forgetless run` or `compare` made."""
    settings = dict(trace.config)
    if not {"scenario", "method"} <= set(settings):
        where = trace.path if trace.path is not None else "the run"
        raise TraceError(
            f"{where} was not made by `forgetless run`: its tasks and its network are in the "
            "script that made it"
        )
    settings.pop("storage_chosen", None)  # what came of the budget, which is the setting
    return resolve(settings.pop("scenario"), settings.pop("method"), **settings)


def tasks_of(trace: Trace, data: Path | None = None) -> Scenario:
    """The tasks of such a run, its images taken from the disk."""
    config = settings_of(trace)
    return build_scenario(config.scenario, config, data, download=False)


def network_of(config: Config, tasks: Scenario, weights: Mapping[str, Tensor]) -> nn.Module:
    """The network of the settings with these weights; what is frozen takes no gradient."""
    model = build_model(config, tasks.input_shape, tasks.n_outputs)
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the weights do not fit the {config.model} of the run: {reason}"
        ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(config.beginnings["freeze"]))
    return model


def out_of_reach(config: Config, tasks: Scenario, model: nn.Module) -> list[str]:
    """The parameters that are trained, but not projected, such as heads."""
    heads = (f"{HEAD}.",) if tasks.has_heads else ()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [name for name in trained if name.startswith(config.beginnings["unprotected"] + heads)]


def samples_of(split: Split) -> tuple[Tensor, Tensor]:
    """All samples as the first seed sees them: inputs (n, *) and labels (n,)."""
    inputs, labels = split.take(torch.arange(len(split)).unsqueeze(0))
    return inputs[0], labels[0]
