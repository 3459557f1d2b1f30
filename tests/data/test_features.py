"""Tasks as a frozen network sees them."""

import pytest
import torch
from torch import nn

from forgetless import (
    SGD,
    ConfigError,
    DataError,
    FeatureScenario,
    TensorScenario,
    Training,
    fit,
    scenario,
)
from tests.conftest import blobs


class Backbone(nn.Module):
    """Counts its calls; its batch norm would differ in training mode."""

    def __init__(self, size=6, features=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, features), nn.BatchNorm1d(features), nn.ReLU())

    def forward(self, inputs):
        Backbone.calls += 1
        return self.layers(inputs)


@pytest.fixture
def backbone():
    torch.manual_seed(0)
    Backbone.calls = 0
    network = Backbone()
    network.layers[1].running_mean += 0.3
    return network


def same_features(found, tasks, network):
    frozen = network.eval()
    for t in range(tasks.n_tasks):
        for own, split in ((found.task(t, [5]).train, tasks.task(t, [5]).train),
                           (found.task(t, [5]).test, tasks.task(t, [5]).test)):  # fmt: skip
            expected = torch.stack([frozen(x.unsqueeze(0))[0] for x in split.inputs])
            torch.testing.assert_close(own.inputs, expected.detach())
            assert own.labels.equal(split.labels)
    return True


def test_inputs_are_what_the_network_makes_of_each_sample_alone(backbone):
    tasks = blobs()
    found = FeatureScenario(tasks, backbone.train(), batch_size=7)
    assert backbone.training, "the network stays as it is"
    assert found.input_shape == (4,)
    assert not found.task(0, [0]).train.inputs.requires_grad
    assert (found.n_outputs, found.setting) == (tasks.n_outputs, tasks.setting)
    assert same_features(found, tasks, backbone)


def test_a_network_in_another_precision_makes_features_too(backbone):
    found = FeatureScenario(blobs(), backbone.double())
    assert found.task(1, [0]).test.inputs.dtype == torch.float32


@pytest.mark.parametrize("full", [False, True])
def test_the_same_outputs_compete(full):
    x, y = torch.randn(4, 6), torch.arange(4) % 2
    pairs = [((x, y), (x, y)), ((x, y + 2), (x, y + 2))]
    tasks = TensorScenario(pairs, setting="class", full_head=full)
    found = FeatureScenario(tasks, nn.Linear(6, 3))
    assert found.full_head is full
    assert found.competing(0) == tasks.competing(0) == range(4 if full else 2)
    assert found.competing(0, learned=1) == range(4)


def test_a_method_trains_on_features(backbone):
    trace = fit(FeatureScenario(blobs(), backbone), SGD(), seeds=2, training=Training(epochs=1))
    assert trace.accuracy.shape == (2, 2, 2)
    assert trace.config["scenario_from"]


def test_features_are_read_from_the_cache_while_network_and_samples_are_the_same(
    backbone, tmp_path
):
    FeatureScenario(blobs(), backbone, cache=tmp_path)
    first, Backbone.calls = Backbone.calls, 0
    assert first == 4
    assert same_features(FeatureScenario(blobs(), backbone, cache=tmp_path), blobs(), backbone)
    Backbone.calls = 0
    FeatureScenario(blobs(seed=1), backbone, cache=tmp_path)
    assert Backbone.calls == 4, "other samples"
    with torch.no_grad():
        backbone.layers[0].weight.copy_(backbone.layers[0].weight.flip(0))  # the sum stays
    found = FeatureScenario(blobs(), backbone, cache=tmp_path)
    assert same_features(found, blobs(), backbone), "other weights"


@pytest.mark.parametrize("spoil", [lambda b: b[:-9], lambda b: b"{}", lambda b: b""])
def test_a_damaged_cache_is_made_again(backbone, tmp_path, spoil):
    FeatureScenario(blobs(), backbone, cache=tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(spoil(file.read_bytes()))
    assert same_features(FeatureScenario(blobs(), backbone, cache=tmp_path), blobs(), backbone)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda inputs: inputs, "network must be a torch.nn.Module"),
        (nn.Linear(5, 3), r"cannot take inputs of shape \(6,\): mat1 and mat2"),
        (nn.Flatten(0), r"returns must be a tensor with a row of features for each of 24 samples"),
        (nn.LSTM(6, 3), r"returns must be .*, not 'tuple'"),
    ],
)
def test_a_network_that_makes_no_features_is_rejected(network, message):
    with pytest.raises(ConfigError, match=message):
        FeatureScenario(blobs(), network)


def test_features_must_be_finite():
    network = nn.Linear(6, 3)
    nn.init.constant_(network.weight, torch.inf)
    with pytest.raises(DataError, match="NaN or infinite"):
        FeatureScenario(blobs(), network)


def test_inputs_must_be_the_same_for_all_seeds():
    tasks = scenario("permuted-digits", tasks=2)
    with pytest.raises(ConfigError, match="the same inputs for all seeds"):
        FeatureScenario(tasks, nn.Flatten())
