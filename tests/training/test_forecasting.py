"""Forecasts by a dry run, against real training and a copy trained by hand."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from forgetless import (
    AGEM,
    EWC,
    OGD,
    PCAOGD,
    SGD,
    ConfigError,
    DataError,
    KronOGD,
    TensorScenario,
    Training,
    TrainingError,
    fit,
    forecast,
)
from forgetless.launch.rebuild import forecast_run, rebuild
from forgetless.training import forecasting
from forgetless.training.forecasting import dry_run
from tests.conftest import blobs

METHODS = [SGD(), EWC(3.0), OGD(8), PCAOGD(3, 24), KronOGD(0.9, samples=24), AGEM(8, 8)]


def network(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))
        return body.double()


def pairs(n: int = 40) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Test samples of the source, training samples of the source and of the target."""
    tasks = blobs(tasks=2, n=n)
    first, second = (tasks.task(t, [0]) for t in (0, 1))
    splits = first.test, first.train, second.train
    return [(split.inputs.double(), split.labels) for split in splits]


@pytest.fixture
def few_steps(monkeypatch):
    """A tenth of the steps also where they are few."""
    for name in ("_LEAST_STEPS", "_FEW_STEPS"):
        monkeypatch.setattr(forecasting, name, 1)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_training_of_few_steps_is_repeated_as_it_will_be(method):
    """One batch holds all samples, so nothing depends on the seed, and the copy is `fit`'s."""
    known, stored, coming = pairs()
    size = len(coming[1])
    tasks = TensorScenario([(stored, known), (coming, known)])
    training = Training(lr=0.3, epochs=5, batch_size=size, dtype="float64")
    trace = fit(tasks, method, network, seeds=[3], training=training)
    before, after = network(), network()
    before.load_state_dict(trace.weights(3, 0))
    after.load_state_dict(trace.weights(3, 1))
    expected = after(known[0]).detach()
    made = rebuild(trace, tasks=tasks, model=network)
    found = forecast_run(made, method, trace, 3, 0, 1)
    assert (found.run.rate, found.run.steps, found.run.of, found.covered) == (1, 5, 5, 1)
    rest = {"rtol": 0, "atol": 1e-9}
    torch.testing.assert_close(found.after.outputs, expected, **rest)
    assert found.accuracy_change == pytest.approx(trace.accuracy[0, 1, 0] - trace.accuracy[0, 0, 0])
    assert float((found.change).abs().max()) > 1e-3
    if method.name in ("sgd", "ogd", "ewc"):  # from Python alone, a random choice apart
        options = {"training": training, "method": method, "remember": stored, "seed": 3}
        alone = forecast(before, known, coming, **options)
        if method.name != "ogd":
            torch.testing.assert_close(alone.after.outputs, expected, **rest)
        assert float((alone.after.outputs - expected).norm()) < float(found.change.norm())


def test_a_tenth_of_the_steps_at_ten_times_the_rate(few_steps):
    known, _, coming = pairs(200)
    training = Training(lr=0.002, epochs=10, batch_size=20, dtype="float64")
    model = network()
    found = forecast(model, known, coming, training=training)
    steps = -(-len(coming[1]) // 20)
    assert (found.run.rate, found.run.steps, found.run.of) == (10, steps, 10 * steps)
    trace = fit(TensorScenario([(coming, known)]), SGD(), model, training=training)
    trained = network()
    trained.load_state_dict(trace.weights(0, 0))
    real = trained(known[0]).detach() - found.now.outputs
    assert (found.change - real).norm() < 0.1 * real.norm()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), network().parameters()))


def test_a_rate_that_is_too_large_is_halved(few_steps):
    """Ten times 0.8 is unstable; the loss of the copy says so, before it diverges."""
    known, _, coming = pairs(200)
    inputs = 4 * coming[0], coming[1]
    training = Training(lr=0.5, epochs=10, batch_size=20, dtype="float64")
    found = forecast(network(), (4 * known[0], known[1]), inputs, training=training)
    assert 1 <= found.run.rate < 10
    assert found.covered == pytest.approx(found.run.rate / 10)
    assert found.after.target_accuracy > found.now.target_accuracy


def test_training_that_diverges_is_said_to(few_steps):
    known, _, coming = pairs(200)
    training = Training(lr=1e36, epochs=10, batch_size=20)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(TrainingError, match=r"NaN or infinite.*a smaller learning rate"):
        forecast(model, known, coming, training=training)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adam", "lr": 1e-3},
        {"optimizer": adam},
        {"momentum": 0.9, "lr": 1e-3},
        {"schedule": "cosine", "lr": 0.005},
    ],
    ids=["adam", "function", "momentum", "cosine"],
)
def test_any_optimizer_and_schedule(settings, few_steps):
    known, _, coming = pairs(400)
    training = Training(epochs=10, batch_size=10, dtype="float64", **settings)
    model = network()
    found = forecast(model, known, coming, training=training)
    trace = fit(TensorScenario([(coming, known)]), SGD(), model, training=training)
    trained = network()
    trained.load_state_dict(trace.weights(0, 0))
    real = trained(known[0]).detach() - found.now.outputs
    assert found.run.rate == 10
    assert (found.change - real).norm() < 0.25 * real.norm()


@pytest.mark.parametrize("method", [SGD(), EWC(3.0)], ids=lambda method: method.name)
def test_heads_of_their_own(method):
    """As `fit` learns the second task: with its own outputs, and heads that nothing holds."""
    known, stored, coming = pairs()
    size = len(coming[1])
    tasks = TensorScenario([(stored, known), (coming, coming)], setting="task")
    training = Training(lr=0.3, epochs=4, batch_size=size, dtype="float64")
    trace = fit(tasks, method, lambda: network(6), seeds=[3], training=training)
    before, after = network(6), network(6)
    before.load_state_dict(trace.weights(3, 0))
    after.load_state_dict(trace.weights(3, 1))
    heads = {"source_classes": range(3), "target_classes": range(3, 6)}
    options = {"method": method, "training": training, "remember": stored, **heads}
    found = forecast(before, known, (coming[0], coming[1] + 3), **options)
    assert found.classes == range(3)
    expected = after(known[0]).detach()
    torch.testing.assert_close(found.after.outputs, expected, rtol=0, atol=1e-9)
    assert found.after.target_accuracy == pytest.approx(trace.accuracy[0, 1, 1])


@dataclass
class Loop:
    """A loop of one's own, which notes what it was given."""

    lr: float = 0.002
    factor: float = 0
    count: int = 0

    def __call__(self, module, inputs, labels, factor):
        self.factor, self.count = factor, len(labels)
        optimizer = torch.optim.SGD(module.parameters(), lr=self.lr * factor)
        for x, y in zip(inputs.split(10), labels.split(10), strict=True):
            optimizer.zero_grad()
            loss = mse_loss if y.is_floating_point() else cross_entropy
            loss(module(x), y).backward()
            optimizer.step()


def test_a_loop_and_a_loss_of_ones_own():
    (x, _), _, (x_target, _) = pairs(400)
    model = network(1)
    source, target = (x, x[:, :1]), (x_target, x_target[:, 1:2])
    loop = Loop()
    found = forecast(model, source, target, train=loop, loss=mse_loss)
    assert loop.count == round(0.1 * len(x_target))
    assert loop.factor == found.run.rate == pytest.approx(10, rel=0.05)
    assert found.now.source_accuracy is found.accuracy_change is None
    real = copy.deepcopy(model)
    Loop()(real, *target, 1.0)
    moved = (real(x) - model(x)).detach()
    assert (found.change - moved).norm() < 0.2 * moved.norm()
    assert found.summary()["endangered"] == []


def test_a_loop_of_ones_own_that_diverges_is_slowed_down():
    known, _, coming = pairs(400)

    class Unstable(Loop):
        def __call__(self, module, inputs, labels, factor):
            super().__call__(module, inputs, labels, factor)
            if factor > 3:
                with torch.no_grad():
                    next(module.parameters()).mul_(torch.inf)

    found = forecast(network(), known, coming, train=Unstable())
    assert 1 < found.run.rate <= 3
    assert found.covered == pytest.approx(found.run.rate / 10, rel=0.05)
    with pytest.raises(TrainingError, match="train leaves weights that are NaN"):
        forecast(
            network(), known, coming, train=lambda m, x, y, f: m[0].weight.data.fill_(torch.nan)
        )


def test_a_dry_run_of_all_steps_is_training():
    """What the measurements call a full copy."""
    known, _, coming = pairs()
    training = Training(lr=0.1, epochs=2, batch_size=10, dtype="float64")
    tasks = TensorScenario([(coming, known)])
    trace = fit(tasks, SGD(), network, training=training)

    def make(settings):
        from forgetless.training.build import make_learner

        return make_learner(tasks, SGD(), network, (0,), settings, None, torch.device("cpu"))

    run = dry_run(make, tasks.task(0, [0]).train, 0, training, share=1.0)
    for name, value in trace.weights(0, 0).items():
        assert torch.equal(run.weights[name], value)
    assert run.covered == run.rate == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share": 0}, r"share must be a share in \(0, 1\)"),
        ({"train": Loop(), "method": OGD()}, "train must be None where training or method is"),
        ({"loss": mse_loss}, "loss must be None, or given together with train"),
        ({"source": (torch.zeros(2, 4), torch.tensor([0, 1]))}, "take the inputs of the source"),
        ({"target": (torch.zeros(0, 6), torch.zeros(0).long())}, "the target has no samples"),
        ({"target": (torch.zeros(4, 6), torch.zeros(4))}, "labels that are not classes"),
        ({"remember": (torch.zeros(4, 6), torch.zeros(3).long())}, "4 inputs and 3 labels"),
        ({"model": nn.Flatten()}, "model must be a network to be trained"),
    ],
)
def test_bad_input_is_one_clear_error(change, message):
    known, _, coming = pairs()
    arguments = {"model": network(), "source": known, "target": coming} | change
    with pytest.raises((ConfigError, DataError), match=message):
        forecast(**arguments)
