"""The guard as a plugin of Avalanche: attached, remembered, beside Avalanche's own A-GEM."""

import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[3] / "examples"))
import _avalanche_on_cpu  # noqa: F401
import _digits

pytest.importorskip("avalanche", reason="needs Avalanche: `make test` installs it")

from avalanche.benchmarks import tensors_benchmark
from avalanche.models import MTSimpleMLP, as_multitask
from avalanche.training import AGEM, Naive
from avalanche.training.plugins import EvaluationPlugin

from forgetless import PCAOGD, ConfigError, Guard
from forgetless.guard.frameworks.avalanche import GuardPlugin
from tests.guard.frameworks.common import Looking, leak, network, points, vector

METHOD = PCAOGD(components=10, samples=48)
pytestmark = pytest.mark.filterwarnings("ignore:No loggers specified")


def benchmark(pairs, labels=None):
    tests = [(inputs[:1], targets[:1]) for inputs, targets in pairs]
    return tensors_benchmark(
        train_tensors=pairs, test_tensors=tests, task_labels=labels or [0] * len(pairs)
    )


def learner(model, plugins=(), strategy=Naive, lr=0.1, epochs=2, **options):
    return strategy(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=8,
        train_epochs=epochs,
        plugins=list(plugins),
        evaluator=EvaluationPlugin(),
        **options,
    )


def check_second_experience(model, plugin, strategy, experiences):
    first, second = experiences
    strategy.train(first)
    guard = plugin.guard
    directions = guard.state_dict()["memory.directions"]
    assert guard.tasks == 1
    assert len(directions) == 10
    before = vector(model, guard.names)
    strategy.train(second)
    assert plugin.guard is guard
    assert guard.tasks == 2
    assert leak(guard, before, vector(model, guard.names), directions) < 1e-5


def test_no_step_touches_what_was_learned():
    model, plugin = network(), GuardPlugin(METHOD)
    stream = benchmark([points(0), points(2)]).train_stream
    check_second_experience(model, plugin, learner(model, [plugin]), stream)


def test_what_a_pretrained_model_does_is_protected():
    model = network()
    stream = benchmark([points(0), points(2)]).train_stream
    plugin = GuardPlugin(METHOD, protect=stream[0].dataset)
    before = vector(model, tuple(name for name, _ in model.named_parameters()))
    learner(model, [plugin]).train(stream[1])
    assert plugin.guard.tasks == 2
    fresh = network()
    alone = Guard(fresh, torch.optim.SGD(fresh.parameters()), METHOD)
    alone.protect(points(0))
    directions = alone.state_dict()["memory.directions"]
    assert leak(plugin.guard, before, vector(model, plugin.guard.names), directions) < 1e-5


@pytest.mark.parametrize("make", [lambda: MTSimpleMLP(input_size=6), None], ids=["own", "wrapped"])
def test_models_that_take_task_labels(make):
    torch.manual_seed(0)
    if make is None:
        body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        body.add_module("classifier", nn.Linear(8, 3))
        model = as_multitask(body, "classifier")
    else:
        model = make()
    plugin = GuardPlugin(METHOD)
    stream = benchmark([points(0), points(2)], labels=[0, 1]).train_stream
    check_second_experience(model, plugin, learner(model, [plugin]), stream)


def test_a_new_optimizer_is_guarded():
    model, plugin = network(), GuardPlugin(METHOD)
    strategy = learner(model, [plugin])
    first, second = benchmark([points(0), points(2)]).train_stream
    strategy.train(first)
    directions = plugin.guard.state_dict()["memory.directions"]
    strategy.optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    before = vector(model, plugin.guard.names)
    strategy.train(second)
    assert leak(plugin.guard, before, vector(model, plugin.guard.names), directions) < 1e-5


def test_what_is_remembered_can_be_saved():
    model, plugin = network(), GuardPlugin(METHOD)
    first, second = benchmark([points(0), points(2)]).train_stream
    learner(model, [plugin]).train(first)
    fresh = GuardPlugin(METHOD)
    fresh.load_state_dict(plugin.state_dict())
    directions = plugin.state_dict()["memory.directions"]
    before = vector(model, plugin.guard.names)
    learner(model, [fresh]).train(second)
    assert fresh.guard.tasks == 2
    assert leak(fresh.guard, before, vector(model, fresh.guard.names), directions) < 1e-5


def test_forgets_less_than_naive_and_a_gem():
    pairs, tests = zip(_digits.turned(0), _digits.turned(60), strict=True)

    def forgotten(strategy, plugins=(), **options) -> float:
        torch.manual_seed(0)
        random.seed(0)  # Avalanche's A-GEM chooses its images with it
        model = _digits.network()
        trained = learner(model, plugins, strategy, lr=0.02, epochs=5, **options)
        scores = []
        for experience in benchmark(pairs).train_stream:
            trained.train(experience)
            scores.append(_digits.accuracy(model, *tests[0]))
        return scores[0] - scores[1]

    naive = forgotten(Naive)
    assert naive > 20
    guarded = forgotten(Naive, [GuardPlugin(PCAOGD(components=200, samples=1000))])
    a_gem = forgotten(AGEM, patterns_per_exp=200, sample_size=64)
    assert guarded < naive / 2
    assert guarded < a_gem


def test_mistakes_are_found_before_training():
    with pytest.raises(TypeError, match="componets"):
        GuardPlugin(METHOD, componets=3)
    with pytest.raises(ConfigError, match="no guard yet"):
        GuardPlugin(METHOD).guard  # noqa: B018


def test_methods_see_the_batch_of_every_step():
    seen = []
    model = network()
    strategy = learner(model, [GuardPlugin(Looking(seen))], epochs=1)
    strategy.train(benchmark([points(0)]).train_stream[0])
    assert [len(batch) for batch in seen] == [8] * 6
    labels = torch.cat([batch.parts[0].target for batch in seen])
    assert torch.equal(labels.sort().values, points(0)[1].sort().values)
