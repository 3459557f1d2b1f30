"""The head of a model: the layer that makes its outputs, however the layers were registered."""

import pytest
import torch
from torch import nn

from forgetless import OGD, SGD, ConfigError, TensorScenario, Training, fit
from forgetless.training.build import head_of
from forgetless.training.models import LeNet

TRAINING = Training(lr=0.1, epochs=1, batch_size=8)


class HeadFirst(nn.Module):
    """Registers the layer with the outputs before the one that runs first."""

    def __init__(self, scale: bool = False, outputs: int = 4) -> None:
        super().__init__()
        self.classifier = nn.Linear(5, outputs)
        self.body = nn.Linear(6, 5)
        if scale:
            self.scale = nn.Linear(1, 1)

    def forward(self, x):
        out = self.classifier(torch.relu(self.body(x)))
        return out * self.scale(torch.ones(1, 1)) if hasattr(self, "scale") else out


def split_tasks():
    torch.manual_seed(0)
    pairs = [(torch.randn(20, 6), torch.arange(20) % 2) for _ in range(2)]
    return TensorScenario([(pair, pair) for pair in pairs], setting="task")


@pytest.mark.parametrize(
    ("make", "shape", "outputs", "expected"),
    [
        (HeadFirst, (6,), 4, ("classifier.",)),
        (lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.LogSoftmax(1)), (6,), 4,
         ("1.",)),
        (lambda: LeNet((1, 8, 8), 5, 4), (1, 8, 8), 4, ("head.",)),
        (lambda: nn.Linear(6, 4), (6,), 4, ("weight", "bias")),
        (lambda: HeadFirst().double(), (6,), 4, ("classifier.",)),
    ],
)  # fmt: skip
def test_the_head_is_the_layer_that_runs_last(make, shape, outputs, expected):
    assert head_of(make(), torch.zeros(2, *shape), outputs) == expected


def test_the_body_is_protected_and_the_head_is_not():
    """With all samples of a task protected, the body must not move where it would change them."""
    trace = fit(split_tasks(), OGD(samples=20), HeadFirst, training=TRAINING)
    first, second = (trace.weights(0, t) for t in (0, 1))
    own = first["classifier.weight"][:2], second["classifier.weight"][:2]
    assert torch.equal(*own)  # the first task's outputs have no gradient in the second
    assert not torch.equal(first["classifier.weight"][2:], second["classifier.weight"][2:])


def test_a_head_that_cannot_be_told_is_named():
    def network():
        return HeadFirst(scale=True)

    message = r"cannot tell which layer .*: scale, .* does not have 4 outputs.*heads=\['head\.'\]"
    with pytest.raises(ConfigError, match=message):
        fit(split_tasks(), OGD(samples=20), network, training=TRAINING)
    fit(split_tasks(), OGD(samples=20), network, heads=["classifier."], training=TRAINING)


def test_too_few_outputs_are_counted():
    def network():
        return HeadFirst(outputs=3)

    for method in (OGD(samples=20), SGD()):
        with pytest.raises(ConfigError, match=r"must give 4 outputs per sample .*, not \(3,\)"):
            fit(split_tasks(), method, network, training=TRAINING)
