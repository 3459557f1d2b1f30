"""S networks in one program: gradients of one and several sets of samples, features."""

import copy

import pytest
import torch
from torch import nn

from forgetless.methods import Samples
from forgetless.tangent import Batch, features
from forgetless.tangent.capture import _CHECKED, capture
from forgetless.tangent.evaluation import Evaluation, autograd_check
from forgetless.training.network import Network
from tests.tangent.reference import built, by_loop, random

SEEDS, SETS, SIZE = 2, 3, 7


def network(training: bool, norm: bool = True) -> Network:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(8)] if norm else []
    modules = [
        nn.Sequential(nn.Linear(6, 8), *norms, nn.ReLU(), nn.Linear(8, 4)) for _ in range(SEEDS)
    ]
    active = torch.tensor([[True, True, False, False], [False, False, True, True]])
    made = Network(
        modules,
        active,
        is_free=lambda name: name in ("2.bias", "3.bias"),
        is_frozen=lambda name: False,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    made.module.train(training)
    return made


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_several_sets_at_once_are_those_of_one_after_the_other(training):
    networks = network(training)
    before = {name: value.clone() for name, value in networks.fixed.items()}
    sets = []
    for k in range(SETS):
        tasks = torch.full((SEEDS, SIZE), k % 2)
        labels = 2 * tasks + torch.randint(0, 2, (SEEDS, SIZE))
        sets.append(Samples(torch.randn(SEEDS, SIZE, 6, dtype=torch.float64), labels, tasks))
    found = networks._gradients_at_once(sets)
    expected = torch.stack([networks.gradient(samples) for samples in sets], dim=1)
    assert found.shape == (SEEDS, SETS, networks.theta.shape[1])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert float((found[:, 0] - found[:, 2]).norm()) > 0.01
    assert all(torch.equal(value, before[name]) for name, value in networks.fixed.items())


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_one_seed_after_another_are_those_of_all_at_once(training, update):
    found, noted = [], []
    for by_seed in (True, False):
        networks = network(training)
        networks.by_seed = by_seed
        torch.manual_seed(1)
        tasks = torch.randint(0, 2, (SEEDS, SIZE))
        samples = Samples(torch.randn(SEEDS, SIZE, 6, dtype=torch.float64), 2 * tasks, tasks)
        found.append(networks.gradient(samples, update_buffers=update))
        noted.append(networks.fixed)
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)
    for name, value in noted[0].items():
        torch.testing.assert_close(value, noted[1][name])


class Doubtful(nn.Linear):
    """Looks at a value, as `vmap` cannot."""

    def forward(self, x):
        y = super().forward(x)
        return y if float(y.detach().sum()) > -1e9 else -y


def test_a_network_that_cannot_run_several_sets_at_once_runs_them_one_by_one():
    networks = Network(
        [Doubtful(6, 4)],
        torch.ones(1, 4, dtype=torch.bool),
        is_free=lambda name: False,
        is_frozen=lambda name: False,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    sets = [
        Samples(torch.randn(1, 5, 6, dtype=torch.float64), torch.zeros(1, 5).long(),
                torch.zeros(1, 5).long())
        for _ in range(SETS)
    ]  # fmt: skip
    found = networks.gradients(sets)
    assert not networks.takes_several_sets
    expected = torch.stack([networks.gradient(samples) for samples in sets], dim=1)
    assert torch.equal(found, expected)


def test_samples_show_only_once_how_much_memory_they_take(monkeypatch):
    sizes = []

    def counted(part, *more):
        sizes.append(part.n)
        return capture(part, *more)

    monkeypatch.setattr(features, "capture", counted)
    net = network(training=False)
    n = 4 * features._PROBE
    labels = torch.zeros(2, n, dtype=torch.long)
    samples = Samples(torch.randn(2, n, 6, dtype=torch.float64), labels, labels)
    first, second = (net.features(samples, seed).gram() for seed in (0, 1))
    assert sizes == [features._PROBE, n, n]
    assert net.loss_features(samples, 0).shape[0] == n
    assert sizes[3:] == [features._PROBE]
    assert not torch.equal(first, second)


@pytest.mark.parametrize("chain", [True, False])
def test_autograd_confirms_once_how_samples_lie_in_a_chain(chain, monkeypatch):
    """Other networks may treat other samples differently, and are asked about each."""
    asked = []
    monkeypatch.setattr(
        "forgetless.tangent.capture.autograd_check",
        lambda *problem: asked.append(len(problem[0])) or autograd_check(*problem),
    )
    net = network(training=False, norm=not chain)
    assert (net.shortcut is not None) == chain
    labels = torch.randint(0, 4, (SEEDS, SIZE))
    for draw in range(2):
        torch.manual_seed(draw)
        inputs = torch.randn(SEEDS, SIZE, 6, dtype=torch.float64)
        for seed in range(SEEDS):
            found = net.features(Samples(inputs, labels, labels), seed).dense()
            module = nn.Sequential(*map(copy.deepcopy, net.module)).eval()
            module.load_state_dict(net.state_dict(seed))
            expected = by_loop(module, inputs[seed], labels[seed])[:, : net.protected_size]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert asked == [_CHECKED] * (1 if chain else 2 * SEEDS)
    net.loss_features(Samples(inputs, labels, labels // 2), 0)  # of another scalar it is asked
    assert len(asked) == (2 if chain else 5)


def test_a_layout_is_not_believed_of_layers_in_another_order():
    layers = [built(lambda: nn.Linear(4, 4)) for _ in range(2)]
    model = nn.ModuleList(layers)
    orders = iter([(0, 1), (0, 1), (1, 0), (1, 0)])  # each once more for autograd's check
    model.forward = lambda x: layers[(order := next(orders))[1]](layers[order[0]](x)).sum(1)
    names = tuple(n for n, _ in model.named_parameters())
    values = {n: p.detach() for n, p in model.named_parameters()}
    x = random(5, 4)
    problem = Evaluation.at(model, values, names, Batch((x,), {}), lambda out: out)
    first = capture(problem)
    second = capture(problem, frozenset(), first.layout)
    assert first.layout is not None
    assert second.layout.layers == tuple(layers[::-1])
