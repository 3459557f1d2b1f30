"""ER, ER-ACE, DER, DER++, LwF, SI and online EWC step by step against Avalanche's own."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import _avalanche_on_cpu  # noqa: F401

pytest.importorskip("avalanche", reason="needs Avalanche: `make test` installs it")

from avalanche.benchmarks import tensors_benchmark
from avalanche.training import DER as TheirDER
from avalanche.training import ER_ACE, Naive
from avalanche.training import EWC as TheirEWC
from avalanche.training import LwF as TheirLwF
from avalanche.training.plugins import EvaluationPlugin, ReplayPlugin, SynapticIntelligencePlugin

from forgetless import DER, DERPP, ER, ERACE, EWC, SI, Guard, LwF
from tests.methods.formula import assert_weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:No loggers specified"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:avalanche"),
    pytest.mark.usefixtures("in_float64"),
]
N, LR = 12, 0.1
STILL = 1e-30  # a learning rate that moves no weight


@pytest.fixture
def in_float64():
    """What Avalanche makes by itself is of the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tasks(classes):
    """As many tasks as there are rows of classes, of a dozen points each."""
    generator = torch.Generator().manual_seed(0)
    labels = [torch.tensor(own).repeat(N // len(own)) for own in classes]
    return [
        (torch.randn(N, 6, generator=generator, dtype=torch.float64) + 0.3 * y[:, None], y)
        for y in labels
    ]


def network(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def move(model, shift):
    """Add the same to all weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += shift


def theirs(model, pairs, strategy, rates, *, size=N, epochs=1, shift=0.0, **options):
    """Weights after Avalanche has trained on all tasks, each at its own learning rate."""
    learner = strategy(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=size,
        train_epochs=epochs,
        evaluator=EvaluationPlugin(),
        **options,
    )
    tests = [(x[:1], y[:1]) for x, y in pairs]
    stream = tensors_benchmark(
        train_tensors=pairs, test_tensors=tests, task_labels=[0] * len(pairs)
    ).train_stream
    for experience, rate in zip(stream, rates, strict=True):
        learner.optimizer.param_groups[0]["lr"] = rate
        learner.train(experience, shuffle=False)
        move(model, shift)
    return model.state_dict()


def ours(model, pairs, method, rates, *, size=N, epochs=1, shift=0.0):
    """The same in a loop of one's own; a task's rate may be a list, one for each epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    guard = Guard(model, optimizer, method)
    for (x, y), rate in zip(pairs, rates, strict=True):
        for lr in rate if isinstance(rate, list) else [rate] * epochs:
            optimizer.param_groups[0]["lr"] = lr
            for some in torch.arange(N).split(size):
                optimizer.zero_grad()
                cross_entropy(model(x[some]), y[some]).backward()
                guard.observe((x[some], y[some]))
                optimizer.step()
        guard.end_task((x, y))
        move(model, shift)
    return model.state_dict()


def check(method, strategy, classes, outputs, rates, their_rates=None, **options):
    pairs, model = tasks(classes), network(outputs)
    shared = {name: options.pop(name) for name in ("size", "epochs", "shift") if name in options}
    found = ours(copy.deepcopy(model), pairs, method, rates, **shared)
    expected = theirs(
        copy.deepcopy(model), pairs, strategy, their_rates or rates, **shared, **options
    )
    assert_weights(found, expected)
    assert any(not torch.allclose(found[n], w) for n, w in model.state_dict().items())


def test_er_is_their_replay():
    """The buffer holds the first task, and the second takes one step on both."""
    plugin = ReplayPlugin(mem_size=N, batch_size=N, batch_size_mem=N)
    check(ER(N, N), Naive, [[0, 1], [2, 3]], 4, [LR, LR], plugins=[plugin])


def test_er_ace_is_twice_their_er_ace():
    """They take the mean of the two losses, and the buffer has the new task from the start."""
    options = {"mem_size": 2 * N, "batch_size_mem": 2 * N}
    classes, rates = [[0, 1], [2, 3]], [STILL, [STILL, LR]]
    check(ERACE(2 * N, 2 * N), ER_ACE, classes, 4, rates, [STILL, 2 * LR], **options)


@pytest.mark.filterwarnings("ignore:0.weight was changed by something else")
@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_der_and_der_plus_plus_are_theirs(beta):
    """They store outputs at the end of a task; between the two the weights are moved by hand."""
    method = DERPP(N, N, alpha=0.3, beta=beta) if beta else DER(N, N, alpha=0.3)
    options = {"mem_size": N, "batch_size_mem": N, "alpha": 0.3, "beta": beta}
    check(method, TheirDER, [[0, 1], [2, 3]], 4, [STILL, LR], shift=0.2, **options)


def test_lwf_is_theirs_with_the_square_of_the_temperature():
    method = LwF(strength=0.5, temperature=3.0)
    options = {"alpha": 0.5 * 3.0**2, "temperature": 3.0, "epochs": 4}
    check(method, TheirLwF, [[0, 1, 2]] * 3, 3, [LR] * 3, **options)


def test_online_ewc_is_theirs_with_half_the_strength():
    """Their importances are squares of batches' gradients, so the batches are of one sample."""
    options = {"ewc_lambda": 1.5, "mode": "online", "decay_factor": 0.7, "size": 1, "epochs": 2}
    check(EWC(strength=3.0, decay=0.7), TheirEWC, [[0, 1, 2]] * 3, 3, [LR] * 3, **options)


def test_si_integrates_their_path(monkeypatch):
    """In the first task; later they follow the penalty's gradient too, and cut Ω at 0.001.

    On a CPU what 0.6.0 notes of the weights shares their memory, and its path is zero: copied here.
    """

    def copied(model, target, excluded):
        for name, parameter in model.named_parameters():
            target[name].data = parameter.detach().flatten().clone()

    monkeypatch.setattr(SynapticIntelligencePlugin, "extract_weights", staticmethod(copied))
    pairs, model = tasks([[0, 1, 2]]), network(3)
    plugin = SynapticIntelligencePlugin(si_lambda=1.0, eps=0.05)
    theirs(copy.deepcopy(model), pairs, Naive, [LR], epochs=5, size=4, plugins=[plugin])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    guard = Guard(model, optimizer, SI(damping=0.05))
    x, y = pairs[0]
    for _ in range(5):
        for some in torch.arange(N).split(4):
            optimizer.zero_grad()
            cross_entropy(model(x[some]), y[some]).backward()
            optimizer.step()
    guard.end_task((x, y))
    shares = plugin.syn_data["cum_trajectory"]
    expected = -torch.cat([shares[name].data for name, _ in model.named_parameters()])
    found = guard._steps.state.importance[0]
    assert found.any()
    torch.testing.assert_close(found, expected.clamp_min(0), rtol=1e-8, atol=1e-12)
