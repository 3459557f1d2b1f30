"""A perceptron's gradient by hand against autograd: products anywhere, kernels on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forgetless.methods import Samples
from forgetless.training.fast.perceptron import Layer, Perceptron, Products, perceptron_of
from forgetless.training.models import MLP
from forgetless.training.network import Network

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def deep():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5),
        nn.ReLU(), nn.Linear(5, 6),
    )  # fmt: skip


MODELS = {
    "the paper's": lambda: MLP(12, 10, 6),
    "deep": deep,
    "linear": lambda: nn.Linear(12, 6),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(12, 8), nn.ReLU()), nn.Linear(8, 6)),
}


WIDE = {
    "wide": lambda: MLP(1024, 100, 6),
}


def network(make, device, dtype, *, seeds=3, heads=False):
    torch.manual_seed(0)
    active = torch.ones(2, 6, dtype=torch.bool)
    if heads:
        active[0, 3:] = active[1, :3] = False
    modules = [make() for _ in range(seeds)]
    last = list(dict(modules[0].named_parameters()))[-2:]
    found = Network(
        modules,
        active,
        is_free=lambda name: heads and len(last) < 4 and name in last and name != "weight",
        is_frozen=lambda name: False,
        device=torch.device(device),
        dtype=dtype,
    )
    found.module.eval()
    return found


def batch(n, device, dtype, *, heads=False, shape=(12,), seed=1):
    torch.manual_seed(seed)
    inputs = torch.randn(3, n, *shape, dtype=dtype, device=device)
    tasks = torch.randint(0, 2, (3, n), device=device)
    labels = torch.randint(0, 3, (3, n), device=device) + 3 * tasks
    return Samples(inputs, labels, tasks if heads else torch.zeros_like(tasks))


def by_autograd(net, samples):
    kept, net.shortcut = net.shortcut, None
    try:
        return net.gradient(samples)
    finally:
        net.shortcut = kept


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_chain_of_rules_is_autograds(name, heads):
    net = network(MODELS[name], "cpu", torch.float64, heads=heads and name != "linear")
    assert net.shortcut is not None
    samples = batch(9, "cpu", torch.float64, heads=heads)
    assert torch.allclose(net.gradient(samples), by_autograd(net, samples), atol=1e-12)
    found = net.logits(net.theta, samples.inputs)
    net.shortcut = None
    assert torch.allclose(found, net.logits(net.theta, samples.inputs), atol=1e-12)


def test_many_samples_go_through_products():
    kernels = SimpleNamespace(MOST_OUTPUTS=256)
    run = Perceptron([Layer(0, 20, 10, 2)], 22, kernels=kernels)
    assert run._products(5, 1, 32) is kernels
    assert run._products(5, 1, 100) is Products
    assert run._products(5, 2, 32) is Products
    wide = Perceptron([Layer(0, 10 * 257, 10, 257)], 11 * 257, kernels=kernels)
    assert wide._products(5, 1, 1) is Products
    assert Perceptron(wide.layers, wide.size)._products(5, 1, 1) is Products
    assert run._products(2**27, 1, 32) is Products  # places are counted in 32 bits


def test_gradients_of_several_sets_use_their_seeds_weights():
    net = network(MODELS["deep"], "cpu", torch.float64)
    several = [batch(4, "cpu", torch.float64, seed=seed) for seed in (1, 2)]
    found = net.gradients(several)
    assert net.takes_several_sets
    for number, samples in enumerate(several):
        assert torch.allclose(found[:, number], by_autograd(net, samples), atol=1e-12)


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    module[0].register_forward_hook(lambda module, args, output: output + 1)
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: Doubled(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU()),
        lambda: nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.ReLU(), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)),
        lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),
        hooked,
    ],
)
def test_what_is_no_perceptron(make):
    module = make()
    shapes = {n: p.shape for n, p in module.named_parameters()}
    assert perceptron_of(module, shapes, torch.zeros(1, 9)) is None


def test_a_frozen_layer_makes_no_perceptron():
    module = deep()
    shapes = {n: p.shape for n, p in module.named_parameters()}
    assert perceptron_of(module, shapes, torch.zeros(1, 9)) is not None
    del shapes["1.weight"]
    assert perceptron_of(module, shapes, torch.zeros(1, 9)) is None


def shared_activation(last):
    act = nn.ReLU()
    return nn.Sequential(nn.Linear(12, 7), act, nn.Linear(7, 6), *([act] if last else []))


def test_a_module_that_is_used_twice_is_used_twice():
    assert network(lambda: shared_activation(last=True), "cpu", torch.float64).shortcut is None
    assert network(lambda: shared_activation(last=False), "cpu", torch.float64).shortcut
    act, same = nn.ReLU(), nn.Linear(6, 6)
    module = nn.Sequential(nn.Linear(12, 6), act, same, act, same)
    shapes = {n: p.shape for n, p in module.named_parameters()}
    assert perceptron_of(module, shapes, torch.zeros(1, 9)) is None


@pytest.mark.parametrize(
    ("make", "shape", "takes"),
    [
        (MODELS["linear"], (12,), True),
        (MODELS["linear"], (3, 4), False),
        (MODELS["nested"], (2, 12), False),
        (deep, (3, 4), True),
        (deep, (12,), True),
        (lambda: nn.Sequential(nn.Flatten(1, 2), nn.Linear(12, 6)), (3, 4), False),
    ],
)
def test_inputs_of_other_shapes_are_left_to_the_module(make, shape, takes):
    net = network(make, "cpu", torch.float64)
    inputs = torch.zeros(3, 5, *shape, dtype=torch.float64)
    assert (net.shortcut is not None and net.shortcut.takes(inputs)) == takes


def test_no_gradient_goes_to_other_tasks_outputs():
    """Not even if the label is one of them."""
    net = network(MODELS["deep"], "cpu", torch.float64, heads=True)
    samples = batch(9, "cpu", torch.float64, heads=True)
    wrong = Samples(samples.inputs, (samples.labels + 3) % 6, samples.tasks)
    assert torch.allclose(net.gradient(wrong), by_autograd(net, wrong), atol=1e-12)


@needs_gpu
def test_kernels_take_labels_and_tasks_however_they_lie_in_memory():
    net = network(MODELS["deep"], "cuda", torch.float32, heads=True)
    samples = batch(9, "cuda", torch.float32, heads=True)
    tasks = samples.tasks[:, :1].expand_as(samples.tasks)
    labels = samples.labels % 3 + 3 * tasks
    found = net.gradient(Samples(samples.inputs, labels, tasks))
    expected = net.gradient(Samples(samples.inputs, labels, tasks.contiguous()))
    assert torch.equal(found, expected)
    across = samples.inputs.mT.contiguous().mT
    found = net.gradient(Samples(across, labels, tasks))
    assert torch.equal(found, expected)


@needs_gpu
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("n", [1, 7, 32, 64, 99, 256])
@pytest.mark.parametrize("name", [*MODELS, *WIDE])
def test_the_kernels_are_as_exact_as_autograd(name, n, heads):
    make, shape = (WIDE[name], (1, 32, 32)) if name in WIDE else (MODELS[name], (12,))
    heads = heads and name != "linear"
    exact = by_autograd(
        network(make, "cuda", torch.float64, heads=heads),
        batch(n, "cuda", torch.float64, heads=heads, shape=shape),
    )
    net = network(make, "cuda", torch.float32, heads=heads)
    net.theta.copy_(network(make, "cuda", torch.float64, heads=heads).theta)
    assert net.shortcut is not None
    samples = batch(n, "cuda", torch.float64, heads=heads, shape=shape)
    samples = Samples(samples.inputs.float(), samples.labels, samples.tasks)
    error = (net.gradient(samples) - exact).norm() / exact.norm()
    assert error < 3e-6
    samples = Samples(samples.inputs * torch.nan, samples.labels, samples.tasks)
    assert net.gradient(samples).isnan().any()
