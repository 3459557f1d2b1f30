"""A method's steps after some tasks of a run, against `fit` where the network is linear."""

import pytest
import torch
from torch import nn

from forgetless import (
    AGEM,
    EWC,
    GEM,
    OGD,
    PCAOGD,
    SGD,
    ConfigError,
    Joint,
    KronOGD,
    TensorScenario,
    Training,
    fit,
)
from forgetless.launch.rebuild import method_step, projections, rebuild, samples_of
from forgetless.subspace import DENSE, DenseSubspace, KroneckerSubspace
from forgetless.theory import linearised_forecast
from tests.conftest import blobs

# Whole tasks are one batch and all samples are stored: nothing depends on a random choice.
N = 24
METHODS = [
    SGD(), EWC(3.0), OGD(N), PCAOGD(2, N), KronOGD(0.9, samples=N, outputs="class"), AGEM(N, 2 * N),
    GEM(N), Joint(),
]  # fmt: skip


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 3)).double()


def conflicting() -> TensorScenario:
    """The same points in every task, with other labels."""
    task = blobs(tasks=1, n=N).task(0, [0])
    pairs = [
        tuple((part.inputs, (part.labels + t) % 3) for part in (task.train, task.test))
        for t in range(3)
    ]
    return TensorScenario(pairs, name="conflicting")


def run_of(method):
    tasks = conflicting()
    training = Training(lr=0.05, epochs=4, batch_size=N, dtype="float64")
    return tasks, training, fit(tasks, method, model, seeds=[3], training=training)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_a_linear_networks_last_task_is_forecast_exactly(method):
    tasks, training, trace = run_of(method)
    made = rebuild(trace, tasks=tasks, model=model)
    network = made.network(trace.weights(3, 1))
    known, coming = tasks.task(0, [3]).test, tasks.task(2, [3]).train
    step = method_step(made, method, trace, seed=3, learned=2)
    found = linearised_forecast(
        network, samples_of(known), samples_of(coming), lr=training.lr, epochs=training.epochs,
        batch_size=N, methods={"mine": step},
    )  # fmt: skip
    after = made.network(trace.weights(3, 2))
    expected = after(samples_of(known)[0].double()).detach()
    torch.testing.assert_close(found.methods["mine"].outputs, expected, rtol=0, atol=1e-9)
    if method.protects:
        assert (found.after.outputs - expected).abs().max() > 1e-3


def test_steps_that_a_method_takes_by_the_batch_cannot_be_forecast():
    class Batches(EWC):
        needs_batch = True

    tasks, _, trace = run_of(SGD())
    made = rebuild(trace, tasks=tasks, model=model)
    with pytest.raises(ConfigError, match="ewc needs the batch of every step"):
        method_step(made, Batches(), trace, seed=3, learned=1)


@pytest.mark.parametrize(
    "method", [OGD(4), PCAOGD(2, N), KronOGD(0.9), KronOGD()], ids=["ogd", "pca", "kron", "drift"]
)
def test_projections_are_those_with_which_the_run_trained(method):
    """The projection after all tasks is the stored one; those before keep every step at home."""
    tasks, _, trace = run_of(method)
    made = rebuild(trace, tasks=tasks, model=model)
    names = [name for name, _ in model().named_parameters()]
    found = projections(made, method, trace, seed=3, learned=4, names=names)
    rows = torch.randn(5, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found[0](rows), rows)
    kind = KroneckerSubspace if isinstance(method, KronOGD) else DenseSubspace
    stored = kind.restore([trace.state(3)], rows[:1], DENSE)
    expected = torch.cat([stored.project_out(row) for row in rows.split(1)])
    torch.testing.assert_close(found[3](rows), expected, rtol=0, atol=1e-9)
    assert (found[3](rows) - rows).abs().max() > 0.1
    for task in (1, 2):
        weights = [trace.weights(3, t) for t in (task - 1, task)]
        moved = torch.cat([(weights[1][n] - weights[0][n]).flatten() for n in names])[None]
        assert moved.norm() > 1e-3
        torch.testing.assert_close(found[task](moved), moved, rtol=0, atol=1e-9)
        step = method_step(made, method, trace, seed=3, learned=task)
        theta = torch.cat([weights[0][n].flatten() for n in names])
        for row in rows:
            torch.testing.assert_close(step(row, theta), found[task](row[None])[0])
