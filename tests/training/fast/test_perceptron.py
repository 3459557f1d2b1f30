"""A perceptron's gradient by hand against autograd: products anywhere, kernels on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forgetless import OGD, PCAOGD, Training, fit
from forgetless.methods import Samples
from forgetless.subspace import FACTORED, empty_subspace
from forgetless.tangent.blocks import Outer
from forgetless.training.fast.perceptron import chain, perceptron_of
from forgetless.training.models import MLP
from forgetless.training.network import Network
from tests.conftest import blobs

EPS = 1e-3  # of the norms here, not PyTorch's own
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
    "normed": lambda: nn.Sequential(
        nn.Linear(12, 20),
        nn.BatchNorm1d(20, EPS),
        nn.ReLU(),
        nn.Linear(20, 9),
        nn.ReLU(),
        nn.Linear(9, 7),
        nn.BatchNorm1d(7, EPS),
        nn.ReLU(),
        nn.Linear(7, 6),
    ),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(12, 8), nn.ReLU()), nn.Linear(8, 6)),
}


WIDE = {
    "wide": lambda: MLP(1024, 100, 6),
    "wide, normed": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(1024, 100), nn.BatchNorm1d(100, EPS), nn.ReLU(), nn.Linear(100, 6)
    ),
}


def network(make, device, dtype, *, seeds=3, heads=False):
    torch.manual_seed(0)
    active = torch.ones(2, 6, dtype=torch.bool)
    if heads:
        active[0, 3:] = active[1, :3] = False
    modules = [make() for _ in range(seeds)]
    last = list(dict(modules[0].named_parameters()))[-2:]
    for name, value in modules[0].state_dict().items():  # norms that do something
        if "running" in name or value.dim() == 1:
            for module in modules:
                module.state_dict()[name].uniform_(0.5, 2)
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
    kept, net.perceptron = net.perceptron, None
    try:
        return net.gradient(samples)
    finally:
        net.perceptron = kept


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_chain_of_rules_is_autograds(name, heads):
    net = network(MODELS[name], "cpu", torch.float64, heads=heads and name != "linear")
    assert net.perceptron is not None
    samples = batch(9, "cpu", torch.float64, heads=heads)
    assert torch.allclose(net.gradient(samples), by_autograd(net, samples), atol=1e-12)
    found = net.logits(net.theta, samples.inputs)
    net.perceptron = None
    assert torch.allclose(found, net.logits(net.theta, samples.inputs), atol=1e-12)


def test_many_samples_go_through_products():
    kernels = SimpleNamespace(MOST_OUTPUTS=256)
    run = chain.Perceptron([chain.Layer(0, 20, 10, 2)], 22, kernels=kernels)
    assert run._faster(5, 1, 32) is kernels
    assert run._faster(5, 1, 100) is chain.products
    assert run._faster(5, 2, 32) is chain.products
    wide = chain.Perceptron([chain.Layer(0, 10 * 257, 10, 257)], 11 * 257, kernels=kernels)
    assert wide._faster(5, 1, 1) is chain.products
    assert chain.Perceptron(wide.layers, wide.size)._faster(5, 1, 1) is chain.products
    assert run._faster(2**27, 1, 32) is chain.products  # places are counted in 32 bits


def test_a_norm_in_training_mode_is_left_to_autograd():
    net = network(MODELS["normed"], "cpu", torch.float64)
    samples = batch(9, "cpu", torch.float64)
    net.module.train()
    found = net.gradient(samples), net.logits(net.theta, samples.inputs)
    by_hand, net.perceptron = net.perceptron, None
    assert by_hand is not None
    assert torch.equal(net.gradient(samples), found[0])
    assert torch.equal(net.logits(net.theta, samples.inputs), found[1])
    net.module.eval()
    assert not torch.allclose(net.gradient(samples), found[0])


def test_gradients_of_several_sets_use_their_seeds_statistics():
    net = network(MODELS["normed"], "cpu", torch.float64)
    several = [batch(4, "cpu", torch.float64, seed=seed) for seed in (1, 2)]
    found = net.gradients(several)
    assert net.runs_several
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
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)),
        lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),
        lambda: nn.Sequential(
            nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False), nn.ReLU(), nn.Linear(3, 2)
        ),
        lambda: nn.Sequential(
            nn.Linear(4, 3),
            nn.BatchNorm1d(3, track_running_stats=False),
            nn.ReLU(),
            nn.Linear(3, 2),
        ),
        hooked,
    ],
)
def test_what_is_no_perceptron(make):
    module = make()
    shapes = {n: p.shape for n, p in module.named_parameters()}
    assert perceptron_of(module, shapes, dict(module.named_buffers()), torch.zeros(1, 9)) is None


def test_a_frozen_layer_makes_no_perceptron():
    module = deep()
    shapes = {n: p.shape for n, p in module.named_parameters()}
    assert perceptron_of(module, shapes, {}, torch.zeros(1, 9)) is not None
    del shapes["1.weight"]
    assert perceptron_of(module, shapes, {}, torch.zeros(1, 9)) is None


def shared_activation(last):
    act = nn.ReLU()
    return nn.Sequential(nn.Linear(12, 7), act, nn.Linear(7, 6), *([act] if last else []))


def test_a_module_that_is_used_twice_is_used_twice():
    assert network(lambda: shared_activation(last=True), "cpu", torch.float64).perceptron is None
    assert network(lambda: shared_activation(last=False), "cpu", torch.float64).perceptron
    act, same = nn.ReLU(), nn.Linear(6, 6)
    module = nn.Sequential(nn.Linear(12, 6), act, same, act, same)
    shapes = {n: p.shape for n, p in module.named_parameters()}
    assert perceptron_of(module, shapes, {}, torch.zeros(1, 9)) is None


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
    found = net._by_hand(torch.zeros(3, 5, *shape, dtype=torch.float64))
    assert (found is not None) == takes


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
    assert net.perceptron is not None
    samples = batch(n, "cuda", torch.float64, heads=heads, shape=shape)
    samples = Samples(samples.inputs.float(), samples.labels, samples.tasks)
    error = (net.gradient(samples) - exact).norm() / exact.norm()
    assert error < 3e-6
    samples = Samples(samples.inputs * torch.nan, samples.labels, samples.tasks)
    assert net.gradient(samples).isnan().any()


def wide():
    return nn.Sequential(
        nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 6)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_is_made_of_its_factors(name, device):
    net, outers = network(MODELS[name], device, torch.float64), {}
    gradient = net.gradient(batch(9, device, torch.float64), outers=outers)
    assert len(outers) == len(net.perceptron.layers)
    for start, (left, right) in outers.items():
        matrix = left.mT @ right
        found = gradient[:, start : start + matrix[0].numel()]
        torch.testing.assert_close(found, matrix.flatten(1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 3, 200], ids=["one", "few", "more than help"])
@pytest.mark.parametrize("remember", ["samples", "directions"])
def test_a_factored_memory_uses_the_batchs_factors(n, remember, device, monkeypatch):
    """The projection is the same, of few samples by other products, of many by the gradient's."""
    net = network(wide, device, torch.float64)
    kept = batch(25, device, torch.float64, seed=2)
    features = [net.features(kept, seed) for seed in range(net.seeds)]
    state = empty_subspace(net.theta, FACTORED)
    if remember == "samples":
        state = state.add_samples(features)
    else:
        state = state.add_principal(features, 7, centred=False)
    outers, used = {}, []
    gradient = net.gradient(batch(n, device, torch.float64), outers=outers)
    plain = Outer.apply_outer
    monkeypatch.setattr(Outer, "apply_outer", lambda *args: used.append(plain(*args)) or used[-1])
    found = state.project_out(gradient, outers)
    torch.testing.assert_close(found, state.project_out(gradient), atol=1e-11, rtol=1e-9)
    assert any(part is not None for part in used) == (n < 200)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", [OGD(samples=20), PCAOGD(5, samples=60)], ids=lambda m: m.name)
def test_a_run_is_the_same_with_and_without_the_batchs_factors(method, device, monkeypatch):
    tasks = blobs(tasks=3, n=84)
    training = Training(lr=0.05, epochs=3, batch_size=4, storage="factored")
    inputs = torch.Size(tasks.input_shape).numel()
    model = lambda: MLP(inputs, 60, tasks.n_outputs)  # noqa: E731
    with_them = fit(tasks, method, model, seeds=2, training=training, device=device)
    monkeypatch.setattr(Outer, "apply_outer", lambda *args: None)
    without = fit(tasks, method, model, seeds=2, training=training, device=device)
    for name, value in with_them.weights(1, 2).items():
        torch.testing.assert_close(without.weights(1, 2)[name], value, atol=1e-5, rtol=1e-4)
