"""Which runs are the same experiment: one configuration, and fingerprints of the rest."""

import copy
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import forgetless
from forgetless import OGD, PCAOGD, SGD, Method, TensorScenario, Training, fit, load_trace
from forgetless.launch.runs import resolve, run
from forgetless.support.plugins import code_of
from forgetless.trace import Trace, differences, same_experiment
from forgetless.trace.experiment import changed_settings, plain
from tests.conftest import blobs

QUICK = Training(lr=0.05, epochs=1, batch_size=8)


def trained(tasks=None, method=None, model=None, training=QUICK, **options) -> Trace:
    return fit(tasks or blobs(), method or SGD(), model, training=training, **options)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@dataclass(frozen=True)
class Own(Method):
    """A method that keeps nothing, with settings of its own."""

    name = "own"
    acts_on = "gradient"
    lr: float = 0.5
    threshold: float = 0.9

    def init(self, view):
        return None

    def update(self, g, state, view):
        return g, state

    def consolidate(self, state, view, task):
        return state


def test_python_and_the_command_note_the_same(tmp_path):
    """README's own example, with fewer epochs, and the same run from the command."""
    tasks = forgetless.scenario("rotated-digits", tasks=2, train_per_class=10)
    method, training = PCAOGD(components=5, samples=20), Training(lr=0.05, epochs=1)
    python = fit(tasks, method, seeds=2, training=training, out=tmp_path / "python")
    given = {"tasks": 2, "train_per_class": 10, "memory": 5, "samples": 20, "lr": 0.05, "epochs": 1}
    config = resolve("rotated-digits", "pca-ogd", seeds="2", device="cpu", **given)
    command = run(config, out=tmp_path / "command")
    assert python.config == command.config == config.as_dict()
    assert python.fingerprint == command.fingerprint
    assert same_experiment(load_trace(tmp_path / "python"), load_trace(tmp_path / "command"))
    assert resolve(**python.config).as_dict() == python.config
    np.testing.assert_array_equal(python.accuracy, command.accuracy)


def test_a_configuration_has_the_settings_that_the_run_uses():
    config = resolve("rotated-digits", "pca-ogd", variance=0.9).as_dict()
    assert config["variance"] == 0.9
    assert not {"memory", "classes_per_task", "seeds", "device", "protocol"} & set(config)
    assert not {"storage", "budget", "unprotected"} & set(trained().config)


def test_seeds_alone_do_not_tell_runs_apart():
    assert same_experiment(trained(seeds=[0, 1]), trained(seeds=[7]))
    together = Training(lr=0.05, epochs=1, batch_size=8, seeds_together=2, evaluate="all")
    assert same_experiment(trained(seeds=2), trained(seeds=2, training=together))


OTHERS = {
    "method": (trained, {"method": OGD(samples=4)}, "method is 'sgd' and 'ogd'"),
    "lr": (trained, {"training": Training(lr=0.1, epochs=1, batch_size=8)}, "lr is 0.05 and 0.1"),
    "model": (trained, {"model": wide}, "model is 'mlp' and 'Sequential'"),
    "tasks": (trained, {"tasks": blobs(3)}, "tasks is 2 and 3"),
    "data": (trained, {"tasks": blobs(seed=1)}, "the data differ"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_makes_another_experiment_is_said(other):
    make, change, message = OTHERS[other]
    one, two = make(), make(**change)
    assert not same_experiment(one, two)
    assert message in differences(one, two)


def test_other_data_of_the_last_task_alone():
    first, second, third = (blobs(seed=s)._splits[s % 2] for s in (0, 1, 3))
    pairs = [[tuple((x.inputs, x.labels) for x in splits) for splits in (first, other)]
             for other in (second, third)]  # fmt: skip
    one, two = (trained(TensorScenario(tasks)) for tasks in pairs)
    assert one.config == two.config
    assert one.fingerprint["data"][0] == two.fingerprint["data"][0]
    assert differences(one, two) == ["the data differ"]


def test_networks_differ_by_layers_code_and_given_weights():
    layers = "the model's layers or their code differ"
    start = "the model's given weights or the function that makes it differ"
    with_lambda = [trained(model=lambda: wide()), trained(model=lambda: deep())]
    assert differences(*with_lambda) == [layers, start]
    assert same_experiment(*(trained(model=lambda: wide()) for _ in range(2)))
    assert trained(model=wide).config["model_from"] == "tests.trace.test_experiment:wide"
    assert with_lambda[0].config["model_from"] == "as given"
    assert same_experiment(trained(model=wide, seeds=[1]), trained(model=wide, seeds=[2]))
    torch.manual_seed(0)
    given = [wide(), wide()]
    assert differences(*(trained(model=module) for module in given)) == [start]
    assert same_experiment(*(trained(model=given[0]) for _ in range(2)))
    copied = [trained(model=lambda net=net: copy.deepcopy(net)) for net in given]
    assert differences(*copied) == [start]
    code = trained(model=Scaled(6, 3)).fingerprint["model"]
    assert code != trained(model=nn.Linear(6, 3)).fingerprint["model"]


def test_a_method_of_ones_own_is_noted_with_all_its_fields():
    trace = trained(method=Own(threshold=0.8))
    assert trace.config["method_from"] == "tests.trace.test_experiment:Own"
    assert (trace.config["lr"], trace.config["own_lr"], trace.config["threshold"]) == (
        0.05, 0.5, 0.8,
    )  # fmt: skip
    assert differences(trace, trained(method=Own())) == ["threshold is 0.8 and 0.9"]


def test_settings_are_what_json_can_hold(tmp_path):
    values = [math.inf, np.float32(0.5), torch.ones(1), {"b", "a"}, (1, 2), blobs, object()]
    wanted = ["inf", 0.5, [1.0], ["a", "b"], [1, 2], "tests.conftest:blobs", "builtins:object"]
    assert [plain(value) for value in values] == wanted
    trace = trained(method=Own(threshold=math.inf), out=tmp_path / "run")
    assert load_trace(tmp_path / "run").config == trace.config


def test_code_of_base_classes_counts():
    class Twice(Scaled):
        pass

    assert "2 * super().forward(x)" in code_of(Twice)


def test_a_scenario_of_ones_own_says_where_it_is_from():
    assert trained().config["scenario_from"] == "forgetless.data.scenarios:TensorScenario"


@pytest.mark.parametrize(("set_to", "same"), [("", True), ("body", False)])
def test_a_setting_that_is_younger_than_the_run_was_not_set(set_to, same):
    there, here = {"lr": 0.1}, {"lr": 0.1, "unprotected": set_to}
    assert (changed_settings(there, here) == "") is same


def test_traces_without_fingerprints_are_compared_by_their_settings():
    one, two = trained(), trained(tasks=blobs(seed=1))
    one.fingerprint = {}
    assert same_experiment(one, two)
