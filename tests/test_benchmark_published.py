"""The published protocols: their networks, their tasks, and one of them in small."""

import numpy as np
import pytest
import torch
from benchmarks import published
from torch import nn

from forgetless import GPM, SGP, TensorScenario, Training, fit

# Weights of the papers' networks without heads.
BODIES = {
    "perceptron": 784 * 100 + 100 * 100,
    "alexnet": 3 * 64 * 16 + 64 * 128 * 9 + 128 * 256 * 4 + 1024 * 2048 + 2048 * 2048,
    "lenet": 3 * 20 * 25 + 20 * 50 * 25 + 3200 * 800 + 800 * 500,
}


@pytest.mark.parametrize("name", [*BODIES, "resnet"])
def test_a_network_has_the_published_layers_and_a_head_at_the_end(name):
    model = getattr(published, name)(7)
    *body, head = [p for p in model.parameters() if p.dim() > 1]
    assert head.shape[0] == 7
    if name in BODIES:
        assert sum(p.numel() for p in body) == BODIES[name]
    else:
        assert len(body) == 17 + 3  # and the ways around
        assert sum(p.numel() for p in body) == pytest.approx(11.16e6, rel=1e-3)
    images = torch.zeros(2, 1, 28, 28) if name == "perceptron" else torch.randn(2, 3, 32, 32)
    assert model(images).shape == (2, 7)


def test_superclasses_have_five_classes_each():
    assert sorted(c for of in published.SUPERCLASSES for c in of) == list(range(100))
    assert {len(of) for of in published.SUPERCLASSES} == {5}
    assert all(sorted(order) == list(range(20)) for order in published.ORDERS)
    assert len(set(published.ORDERS)) == 5


def test_initial_weights_as_released():
    for parameter in published.lenet_as_released(7).parameters():
        bound = (6 / parameter[0].numel()) ** 0.5
        assert 0.9 * bound < parameter.abs().max() <= bound


def test_scrambled_images_are_planar_ones_read_with_the_colours_last():
    rng = np.random.default_rng(0)
    planar = rng.integers(256, size=(4, 3, 32, 32), dtype=np.uint8)
    expected = planar.ravel().reshape(4, 32, 32, 3).transpose(0, 3, 1, 2)
    found = published.scrambled(torch.from_numpy(planar))
    np.testing.assert_array_equal(found.numpy(), expected)


def test_every_protocol_names_a_method_and_what_the_paper_printed():
    printed = {n: p.printed[0] for n, p in published.PROTOCOLS.items() if p.printed[0]}
    assert printed["permuted:gpm"] == 93.91
    assert printed["split-cifar:sgp"] == 76.05
    for name, protocol in published.PROTOCOLS.items():
        assert name.split(":")[1] == protocol.method.name
        assert (protocol.printed[0] is None) == (protocol.method.name == "sgd")


@pytest.mark.parametrize("method", [GPM(samples=20), SGP(samples=20)])
def test_the_plateau_protocol_in_small(method):
    """Batch norm without running statistics, dropout, a head for each task, held-out samples."""
    generator = torch.Generator().manual_seed(0)

    def task(shift):
        x = torch.randn(200, 6, generator=generator) + shift
        return (x[:120], (x[:120, 0] > shift).long()), (x[120:], (x[120:, 0] > shift).long())

    def model():
        norm = nn.BatchNorm1d(16, track_running_stats=False)
        body = nn.Linear(6, 16, bias=False), norm, nn.ReLU(), nn.Dropout(0.2)
        return nn.Sequential(*body, nn.Linear(16, 4, bias=False))

    settings = {"schedule": "plateau", "decay_after": 2, "held_out": 0.2, "evaluation_batch": 8}
    training = Training(lr=0.3, epochs=30, batch_size=8, **settings)
    tasks = TensorScenario([task(0.0), task(2.0)], setting="task")
    trace = fit(tasks, method, model, training=training)
    assert np.diagonal(trace.accuracy[0]).min() > 80


def test_rates_of_adam_nscl_are_lower_after_the_first_task():
    make = published.rates_of_adam_nscl()
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (2,), (4, 2))]
    rates = [[group["lr"] for group in make(parameters).param_groups] for _ in range(3)]
    assert rates == [[1e-4, 5e-4, 1e-3], [5e-5, 5e-4, 1e-3], [5e-5, 5e-4, 1e-3]]
