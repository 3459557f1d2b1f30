"""The configuration and the fingerprints of a run: of functions, and of settings without effect."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from forgetless import SGD, ConfigError, Training, fit
from forgetless.launch.rebuild import rebuild
from forgetless.launch.runs import refuse_unused, resolve
from forgetless.report.analysis import analyse
from forgetless.trace import differences, same_experiment
from forgetless.training.build import layers_fingerprint
from forgetless.training.models import MLP
from tests.conftest import blobs

SCRIPT = """
import torch

def made(parameters):
    return torch.optim.SGD(parameters, lr={lr})
"""


def trained(**options):
    return fit(blobs(), SGD(), training=Training(epochs=1, **options))


def test_a_function_is_noted_by_its_file_and_its_code(tmp_path):
    for name, lr in (("one", 0.1), ("two", 0.2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(SCRIPT.format(lr=lr))
    one, two = (trained(optimizer=f"{tmp_path}/{name}/mine.py:made") for name in ("one", "two"))
    assert one.config["optimizer"] == two.config["optimizer"] == "mine:made"
    assert differences(one, two) == ["the training's settings differ"]
    from forgetless.support.plugins import load_object

    given = trained(optimizer=load_object(f"{tmp_path}/one/mine.py:made", "optimizer"))
    assert same_experiment(one, given)


def test_a_function_without_a_name_is_as_given():
    def of(lr):
        return trained(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr))

    trace = of(0.1)
    assert trace.config["optimizer"] == "as given"
    assert same_experiment(trace, of(0.1))
    assert differences(trace, of(0.2)) == ["the training's settings differ"]
    assert rebuild(trace, tasks=blobs()).training.epochs == 1


def test_settings_without_effect_are_not_noted():
    assert same_experiment(trained(decay=0.3), trained(decay=0.7, least_lr=0.1))
    assert not {"decay", "decay_after", "least_lr", "held_out"} & set(trained().config)
    config = trained(schedule="step", decay=0.3, optimizer="adam").config
    assert (config["decay"], "momentum" in config) == (0.3, False)
    given = {"decay": 0.3, "schedule": "cosine"}
    with pytest.raises(ConfigError, match="--decay is only for the schedules step and plateau"):
        refuse_unused([resolve("rotated-digits", "sgd", **given)], given)


def test_only_plain_sgd_is_forecast():
    tasks, points = blobs(3), []
    for options in ({}, {"optimizer": "adamw"}, {"schedule": "cosine"}):
        trace = fit(tasks, SGD(), training=Training(epochs=1, lr=0.01, **options))
        points.append(len(analyse(trace, tasks=tasks, samples=10).forecast))
    assert points == [2, 0, 0]


@pytest.mark.parametrize(
    "other", [nn.Linear(4, 2, bias=False), nn.Sequential(nn.Linear(4, 2)), nn.Linear(4, 3)]
)
def test_other_layers_have_another_fingerprint(other):
    assert layers_fingerprint(nn.Linear(4, 2)) == layers_fingerprint(nn.Linear(4, 2))
    assert layers_fingerprint(nn.Linear(4, 2)) != layers_fingerprint(other)


@pytest.mark.parametrize("kind", [torch.tensor, np.array, lambda values: [torch.tensor(values)]])
def test_values_that_a_function_holds_count_number_by_number(kind):
    """Their text shortens them, and their sums do not tell an order."""

    def holding(values):
        held = kind(values)

        def made(parameters):
            assert held is not None
            return torch.optim.SGD(parameters, lr=0.1)

        return trained(optimizer=made)

    values = list(range(2000))
    swapped = [*values[:1000], 1001, 1000, *values[1002:]]
    trace = holding(values)
    assert same_experiment(trace, holding(values))
    assert differences(trace, holding(swapped)) == ["the training's settings differ"]


def test_the_weights_that_a_function_starts_from_count_number_by_number():
    network = MLP(6, 5, 3)
    turned = copy.deepcopy(network)
    turned.head.weight.data = network.head.weight.data.flip(0)  # the sum stays
    one, again, other = (
        fit(blobs(), SGD(), partial(copy.deepcopy, given), training=Training(epochs=1))
        for given in (network, copy.deepcopy(network), turned)
    )
    assert same_experiment(one, again)
    assert "the model's given weights" in differences(one, other)[0]
