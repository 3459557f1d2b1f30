"""The configuration and the fingerprints of a run: of functions, and of settings without effect."""

import pytest
import torch
from torch import nn

from forgetless import SGD, ConfigError, Training, fit
from forgetless.launch.rebuild import rebuild
from forgetless.launch.runs import refuse_unused, resolve
from forgetless.report.analysis import analyse
from forgetless.trace import differences, same_experiment
from forgetless.training.build import layers_fingerprint
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
