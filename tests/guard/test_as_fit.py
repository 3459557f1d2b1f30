"""A guard in a loop of one's own gives the numbers of `fit`."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from forgetless import Guard, Training, fit
from forgetless.support.streams import global_stream, stream
from forgetless.training.models import MLP
from tests.methods.test_all_methods import TABLE

SEED = 3
TRAINING = Training(lr=0.05, epochs=2, batch_size=16, dtype="float64")
WAYS = [
    pytest.param(method, project, id=f"{name}, {project}")
    for name, method in TABLE.items()
    for project in ("update", "gradient")
    if name != "a-gem, released" and (project == "gradient" or method.acts_on == "update")
]


def of_task(scenario, t, part):
    split = getattr(scenario.task(t, [SEED]), part)
    inputs, labels = split.take(torch.arange(len(split)).unsqueeze(0))
    return inputs[0].double(), labels[0]


@pytest.mark.parametrize(("method", "project"), WAYS)
def test_the_accuracy_matrix_and_the_weights(method, project, digits):
    check(method, project, TRAINING, SGD, digits)


@pytest.mark.parametrize(
    "name", ["pca-ogd", "kron-ogd", "kron-ogd, drift", "ewc", "a-gem", "si", "er"]
)
@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"optimizer": "adamw", "weight_decay": 0.1}, partial(AdamW, weight_decay=0.1)),
        ({"momentum": 0.9, "weight_decay": 0.01}, partial(SGD, momentum=0.9, weight_decay=0.01)),
    ],
    ids=["adamw", "momentum"],
)
def test_with_any_optimizer(name, settings, make, digits):
    method = TABLE[name]
    check(method, method.acts_on, replace(TRAINING, lr=0.01, **settings), make, digits)


def check(method, project, training, make, digits):
    """Both with an optimizer that starts afresh with each task."""
    with global_stream(SEED, "initial weights"):
        model = MLP(64, 100, 10).double()
    optimizer = make(model.parameters(), lr=training.lr)
    guard = Guard(model, optimizer, method, project=project, seed=SEED)
    batches = stream(SEED, "batches")
    accuracy = np.full((3, 3), np.nan)
    for t in range(3):
        x, y = of_task(digits, t, "train")
        optimizer.state.clear()
        for _ in range(training.epochs):
            for index in torch.randperm(len(x), generator=batches).split(training.batch_size):
                optimizer.zero_grad()
                cross_entropy(model(x[index]), y[index]).backward()
                guard.observe((x[index], y[index]))
                optimizer.step()
        dataset = torch.utils.data.TensorDataset(x, y)
        guard.end_task(torch.utils.data.DataLoader(dataset, batch_size=50, shuffle=True))
        with torch.no_grad():
            for s in range(t + 1):
                test_x, test_y = of_task(digits, s, "test")
                right = model(test_x).argmax(1) == test_y
                accuracy[t, s] = 100 * right.double().mean()
    trace = fit(digits, method, seeds=[SEED], training=training)
    np.testing.assert_allclose(accuracy, trace.accuracy[0])
    for name, weight in trace.weights(SEED, 2).items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-7, atol=1e-9)
