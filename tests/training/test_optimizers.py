"""Any optimizer in `fit`, against the same optimizer in an ordinary loop over the same batches."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import ClassVar

import pytest
import torch
from torch import nn

from forgetless import EWC, OGD, SGD, ConfigError, Method, Training, fit
from forgetless.trace import same_experiment
from forgetless.training.settings import OPTIMIZERS
from tests.conftest import blobs
from tests.faults.problems import Plug, assert_same, small_run, stopped_run

EPOCHS = 5
FULL = Training(lr=0.01, epochs=EPOCHS, batch_size=1000, dtype="float64")


def start() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def by_hand(make, schedule=None, tasks=2, change=lambda task, model, optimizer: optimizer.step()):
    """An ordinary loop: a fresh optimizer for each task, full batches."""
    model = start()
    scenario = blobs(tasks=tasks)
    for t in range(tasks):
        optimizer = make(model.parameters())
        scheduler = schedule(optimizer) if schedule else None
        train = scenario.task(t, [0]).train
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train.inputs.double()), train.labels).backward()
            change(t, model, optimizer)
            if scheduler:
                scheduler.step()
    return model.state_dict()


def assert_close(trace, expected, task=1):
    found = trace.weights(0, task)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_named_optimizer_is_torchs(name):
    kind = getattr(torch.optim, OPTIMIZERS[name])
    training = replace(FULL, optimizer=name, weight_decay=0.1)
    trace = fit(blobs(tasks=2), SGD(), start(), training=training)
    assert_close(trace, by_hand(lambda params: kind(params, lr=0.01, weight_decay=0.1)))


@pytest.mark.parametrize("name", ["sgd", "rmsprop"])
def test_momentum_is_torchs(name):
    kind = getattr(torch.optim, OPTIMIZERS[name])
    training = replace(FULL, optimizer=name, momentum=0.9)
    trace = fit(blobs(tasks=2), SGD(), start(), training=training)
    assert_close(trace, by_hand(lambda params: kind(params, lr=0.01, momentum=0.9)))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("settings", "scheduler"),
    [
        ({"schedule": "cosine"}, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, EPOCHS)),
        (
            {"schedule": "linear"},
            lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, EPOCHS),
        ),
        (
            {"schedule": "step", "decay": 0.1, "decay_after": 2},
            lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.1),
        ),
    ],
    ids=["cosine", "linear", "step"],
)
def test_a_schedule_is_torchs(settings, scheduler, optimizer):
    kind = getattr(torch.optim, OPTIMIZERS[optimizer])
    training = replace(FULL, optimizer=optimizer, **settings)
    trace = fit(blobs(tasks=2), SGD(), start(), training=training)
    expected = by_hand(lambda params: kind(params, lr=0.01, weight_decay=0.0), scheduler)
    assert_close(trace, expected)


def test_a_function_gets_parameters_of_their_own_shapes():
    shapes = []

    def make(params):
        shapes.append([tuple(p.shape) for p in params])
        matrices, vectors = [p for p in params if p.dim() == 2], [p for p in params if p.dim() < 2]
        groups = [{"params": matrices, "lr": 0.02}, {"params": vectors}]
        return torch.optim.AdamW(groups, lr=0.01)

    training = replace(FULL, optimizer=make, schedule="cosine", seeds_together=2)
    trace = fit(blobs(tasks=2), SGD(), start(), seeds=2, training=training)
    assert shapes == [[(5, 6), (5,), (3, 5), (3,)]] * 4  # each seed, each task
    expected = by_hand(
        lambda params: make(list(params)),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, EPOCHS),
    )
    assert_close(trace, expected)


def test_an_optimizer_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n\ndef make(params):\n    return torch.optim.Adam(params, 0.01)\n"
    )
    trace = fit(blobs(tasks=2), SGD(), start(), training=replace(FULL, optimizer=f"{file}:make"))
    assert_close(trace, by_hand(lambda params: torch.optim.Adam(params, 0.01)))


@dataclass(frozen=True)
class Axis(Method):
    """Takes away the first coordinate of updates, from the second task on."""

    name: ClassVar[str] = "axis"
    acts_on: ClassVar[str] = "update"

    def init(self, view):
        return 0

    def update(self, g, state, view):
        if not state:
            return g, state
        g = g.clone()
        g[:, 0] = 0
        return g, state

    def consolidate(self, state, view, task):
        return state + 1


def test_an_update_is_projected_momentum_and_all():
    """AdamW's weight decay and moments do not move a protected coordinate."""

    def change(task, model, optimizer):
        weight = model[0].weight
        before = weight[0, 0].item()
        optimizer.step()
        if task:
            with torch.no_grad():
                weight[0, 0] = before

    training = replace(FULL, optimizer="adamw", weight_decay=0.1)
    trace = fit(blobs(tasks=2), Axis(), start(), training=training)
    expected = by_hand(
        lambda params: torch.optim.AdamW(params, 0.01, weight_decay=0.1), change=change
    )
    assert_close(trace, expected)
    first, second = (trace.weights(0, t)["0.weight"][0, 0] for t in (0, 1))
    assert first == second


def test_a_gradient_is_changed_before_the_optimizer_gets_it():
    """EWC's penalty goes through Adam's moments."""
    method = EWC(strength=5.0)
    scenario = blobs(tasks=2)
    fisher: list[torch.Tensor] = []
    anchor: list[torch.Tensor] = []

    def change(task, model, optimizer):
        parameters = list(model.parameters())
        if task and not fisher:
            train = scenario.task(0, [0]).train
            fisher.extend(torch.zeros_like(p) for p in parameters)
            anchor.extend(p.detach().clone() for p in parameters)
            for x, y in zip(train.inputs.double(), train.labels, strict=True):
                loss = nn.functional.cross_entropy(model(x[None]), y[None])
                for f, g in zip(fisher, torch.autograd.grad(loss, parameters), strict=True):
                    f += g.square() / len(train)
        for p, f, a in zip(parameters, fisher, anchor, strict=False):
            p.grad += 5.0 * f * (p.detach() - a)
        optimizer.step()

    trace = fit(scenario, method, start(), training=replace(FULL, optimizer="adam"))
    assert_close(trace, by_hand(lambda params: torch.optim.Adam(params, 0.01), change=change))


def test_a_seeds_result_does_not_depend_on_those_beside_it():
    training = Training(lr=0.01, epochs=2, batch_size=8, optimizer="adamw", schedule="cosine")
    alone = fit(blobs(), OGD(samples=4), seeds=[1], training=training)
    both = fit(blobs(), OGD(samples=4), seeds=[0, 1], training=replace(training, seeds_together=2))
    for name, value in alone.weights(1, 1).items():
        torch.testing.assert_close(both.weights(1, 1)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 4, 6, 9, 12])  # a task has six or nine
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw", "schedule": "cosine"},
        {"momentum": 0.9, "schedule": "plateau", "held_out": 0.3, "decay_after": 1},
        {"optimizer": "radam", "held_out": 0.3, "early_stopping": 1},
        {"augmentation": lambda x, g: x + 0.1 * torch.randn(x.shape, generator=g)},
    ],
    ids=["adamw", "plateau", "early stopping", "augmentation"],
)
def test_a_run_resumes_bit_for_bit(settings, steps, monkeypatch, tmp_path):
    training = Training(lr=0.02, epochs=3, batch_size=8, **settings)
    expected = small_run(None, training=training)
    stopped_run(tmp_path / "run", Plug(monkeypatch), steps, training=training)
    assert_same(small_run(tmp_path / "run", training=training), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adamm"}, "optimizer must be sgd, adam, .*not 'adamm'"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum must be 0 .* sgd and rmsprop, not 0.9"),
        ({"optimizer": torch.optim.SGD, "weight_decay": 0.1}, "weight_decay must be 0"),
        ({"schedule": "plateau"}, "held_out must be a share"),
        ({"held_out": 0.1}, "held_out must be 0 without"),
        ({"early_stopping": 2}, "held_out must be a share"),
        ({"schedule": "cosin"}, "schedule must be constant or cosine"),
        ({"augmentation": "rotate"}, "augmentation must be nothing, crop, flip"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ConfigError, match=message):
        Training(**settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda params: None, "optimizer must be a function of parameters that returns"),
        (lambda params: torch.optim.LBFGS(params), "one that takes a step without a closure"),
        (lambda params, lr: None, "optimizer cannot be made"),
    ],
)
def test_functions_that_make_no_optimizer(make, message):
    with pytest.raises(ConfigError, match=message):
        fit(blobs(), SGD(), training=Training(optimizer=make))


def test_a_trace_tells_functions_apart_and_its_settings_can_be_read_without_them():
    traces = [
        fit(blobs(tasks=1), SGD(), training=replace(FULL, optimizer=make))
        for make in (
            lambda params: torch.optim.Adam(params, lr=0.01),
            lambda params: torch.optim.Adam(params, lr=0.02),
            partial(torch.optim.Adam, lr=0.03),
        )
    ]
    assert not any(same_experiment(a, b) for a, b in combinations(traces, 2))
    for trace in traces:
        Training(optimizer=trace.config["optimizer"])
    with pytest.raises(ConfigError, match=r"optimizer must be FILE:NAME, such as script\.py:make"):
        fit(blobs(), SGD(), training=Training(optimizer=traces[0].config["optimizer"]))
