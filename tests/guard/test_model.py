"""Models of every kind: normalised, random, compiled, tied, of half or double precision."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

import forgetless
from forgetless import AGEM, EWC, GEMNT, OGD, PCAOGD, ConfigError, Guard, tangent_features
from forgetless.theory import linearised_forecast

from ..tangent import networks as net
from ..tangent.reference import built, integers, random
from .problems import CLASSES, INPUTS, exact_basis, flat, guarded, mlp, seeded, task, train


def normalised():
    return nn.Sequential(
        nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.5), nn.Linear(20, 4)
    )


@pytest.mark.parametrize(
    "method", [OGD(1000), PCAOGD(5), AGEM(), EWC(), GEMNT()], ids=lambda m: m.name
)
def test_statistics_and_modes_are_left_as_they_are(method):
    model = seeded(normalised)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, method)
    model.train()
    model[1].eval()  # someone froze the statistics
    modes = {n: m.training for n, m in model.named_modules()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    guard.end_task(task(0))
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    model.train()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    optimizer.step()  # gradients on memories go through the model in train mode
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    assert all(m.training for m in model.modules())


def test_features_are_those_of_eval_mode():
    model = seeded(normalised)
    train(model, optim.SGD(model.parameters(), lr=0.1), task(1), steps=5)  # some statistics
    model.train()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, OGD(1000))
    guard.end_task(task(0))
    found = guard.state_dict()["memory.directions"].double()
    basis = exact_basis(model, *task(0))
    torch.testing.assert_close((found @ basis.T) @ basis, found, rtol=0, atol=1e-4)
    before = flat(model)
    train(model, optimizer, task(1))
    delta = flat(model) - before
    assert float((basis @ delta).norm() / delta.norm()) < 1e-5


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a part of it, in place"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_models(backend, whole):
    plain = mlp()
    twin, other, _ = guarded(plain, partial(optim.Adam, lr=1e-2), storage="factored")
    inner = mlp()
    if whole:
        model = torch.compile(inner, backend=backend)
    else:
        inner.compile(backend=backend)
        model = inner
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, task(1))
    inner.load_state_dict(mlp().state_dict())
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, OGD(1000), storage="factored")
    assert guard.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    guard.end_task(task(0))
    # By rules, not by a loop over samples.
    assert guard.memory_report().bytes < 30 * 4 * flat(inner).numel()
    train(model, optimizer, task(1), steps=3)
    train(twin, other, task(1), steps=3)
    torch.testing.assert_close(flat(inner), flat(twin), rtol=1e-4, atol=1e-6)


def test_data_parallel_models():
    inner = mlp()
    model = nn.DataParallel(inner)
    guard = Guard(model, optim.SGD(model.parameters()), OGD(5))
    assert guard.names[0] == "0.weight"
    guard.end_task(task(0))
    assert guard.memory_report().directions == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", ["dense", "factored"])
def test_weights_of_half_precision(dtype, storage):
    """Features are computed in float32; a step is rounded to what the weights can hold."""
    model = mlp().to(dtype)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    guard = Guard(model, optimizer, OGD(10), storage=storage)
    x, y = task(0, n=10)
    guard.end_task((x.to(dtype), y))
    basis = exact_basis(model, x.to(dtype), y)
    assert guard.memory_report().directions == 10
    # Of a gradient inside of the protected space only rounding is left.
    inside = (torch.ones(1, len(basis)).double() @ basis)[0]
    for p, part in zip(
        model.parameters(), inside.split([p.numel() for p in model.parameters()]), strict=True
    ):
        p.grad = part.view_as(p).to(dtype)
    before = flat(model)
    optimizer.step()
    delta = flat(model) - before
    assert float(delta.norm()) < (0.03 if dtype == torch.bfloat16 else 0.005) * float(inside.norm())
    with pytest.warns(UserWarning, match="no room to learn"):
        guard.end_task((task(1)[0].to(dtype), task(1)[1]))
    assert all(p.dtype == dtype for p in model.parameters())


def roundings(weights: torch.Tensor, dtype: torch.dtype) -> float:
    """The norm of the largest rounding errors of these weights."""
    spacing = torch.finfo(dtype).eps * torch.exp2(weights.abs().double().log2().floor())
    return float(spacing.norm()) / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_half_precision_cannot_hold_does_not_add_up(dtype):
    """After any number of steps the weights are one rounding away from an exact projection."""
    model = mlp().to(dtype)
    optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    guard = Guard(model, optimizer, OGD(10))
    x, y = task(0, n=10)
    guard.end_task((x.to(dtype), y))
    basis, before = exact_basis(model, x.to(dtype), y).double(), flat(model).double()
    x, y = task(1)
    for step in range(400):
        if step == 200:  # what is left of rounding is in the state
            state, weights = guard.state_dict(), flat(model)
            optimizer_state = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
        optimizer.step()
    way = flat(model).double() - before
    assert float(way.norm()) > 5 * roundings(before, dtype)
    assert float((basis @ way).norm()) < roundings(flat(model), dtype)

    again = mlp().to(dtype)
    nn.utils.vector_to_parameters(weights.to(dtype), again.parameters())
    optimizer = optim.SGD(again.parameters(), lr=0.02, momentum=0.9)
    optimizer.load_state_dict(optimizer_state)
    Guard(again, optimizer, OGD(10)).load_state_dict(state)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(again(x.to(dtype)).float(), y).backward()
        optimizer.step()
    assert torch.equal(flat(again), flat(model))


def test_half_and_single_precision_side_by_side():
    model = mlp()
    model[2].half()
    run = lambda m, x: m.inner[2](m.inner[1](m.inner[0](x)).to(m.inner[2].weight.dtype))  # noqa: E731
    wrapped = net.Calls(run, inner=model)
    optimizer = optim.SGD(wrapped.parameters(), lr=0.1)
    guard = Guard(wrapped, optimizer, OGD(6))
    guard.end_task(task(0))
    x, y = task(1)
    nn.functional.cross_entropy(wrapped(x).float(), y).backward()
    optimizer.step()
    assert guard.stats().steps == 1
    assert model[2].weight.dtype == torch.half


def test_double_precision_is_exact_to_double_precision():
    for storage in ("dense", "factored"):
        model = mlp().double()
        data = task(0, dtype=torch.float64)
        make = partial(optim.Adam, lr=1e-2)
        model, optimizer, _ = guarded(model, make, data=data, storage=storage)
        basis = exact_basis(model, *data)
        for number in range(3):
            before = flat(model)
            train(model, optimizer, task(1, dtype=torch.float64), seed=number)
            delta = flat(model) - before
            assert float((basis @ delta).norm() / delta.norm()) < 1e-12


TEXTS = {
    "tied embedding": (net.tied_embedding, 4),
    "transformer": (net.transformer, 5),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("storage", ["dense", "factored"])
def test_tied_weights_and_embeddings(name, storage):
    make, length = TEXTS[name]
    model = built(make)
    tokens, labels = integers(net.V, 6, length), integers(net.V, 6, seed=1)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, OGD(), storage=storage)
    guard.end_task((tokens, labels))
    basis = exact_basis(model, tokens, labels)
    before = flat(model)
    nn.functional.cross_entropy(model(tokens.flip(0)), labels).backward()
    optimizer.step()
    delta = flat(model) - before
    assert float((basis @ delta).norm() / delta.norm()) < 1e-9
    assert model.out.weight is model.tokens.weight


def test_recurrent_and_convolutional_models():
    for make, x in (
        (lambda: net.recurrent(nn.LSTM), random(6, 5, 3)),
        (net.residual, random(6, 2, 6, 6)),
        (lambda: net.encoder_layer(True), random(6, 5, net.D)),
    ):
        model = built(make).train()
        labels = integers(3, 6)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        guard = Guard(model, optimizer, OGD(), storage="factored")
        guard.end_task((x, labels))
        basis = exact_basis(model, x, labels)
        before = flat(model)
        nn.functional.cross_entropy(model(x.flip(0)), labels).backward()
        optimizer.step()
        delta = flat(model) - before
        assert float((basis @ delta).norm() / delta.norm()) < 1e-8


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", [OGD(5), AGEM(5), EWC()], ids=lambda m: m.name)
def test_a_task_that_ends_where_gradients_are_off(mode, method):
    model, twin = mlp(), mlp()
    results = []
    for one, manager in ((model, mode), (twin, torch.enable_grad)):
        optimizer = optim.SGD(one.parameters(), lr=0.1)
        guard = Guard(one, optimizer, method)
        with manager():
            guard.end_task(task(0))
        train(one, optimizer, task(1), steps=2)
        results.append(flat(one))
    torch.testing.assert_close(*results)


def test_gradients_of_the_users_are_left_alone():
    """A task may end between backward and step."""
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, AGEM())
    guard.end_task(task(0))
    nn.functional.cross_entropy(model(task(1)[0]), task(1)[1]).backward()
    before = copy.deepcopy([p.grad for p in model.parameters()])
    guard.end_task(task(1))
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, old)


def test_a_second_order_graph_is_not_kept():
    model, optimizer, _ = guarded(project="gradient")
    loss = nn.functional.cross_entropy(model(task(1)[0]), task(1)[1])
    loss.backward(create_graph=False)
    optimizer.step()
    assert all(p.grad.grad_fn is None for p in model.parameters())


class Centred(nn.Module):
    """Its samples are compared with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, 20), nn.Linear(20, CLASSES)

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.tanh(h - h.mean(0)))


def unaccounted():
    norm = nn.BatchNorm1d(9, track_running_stats=False)
    return nn.Sequential(nn.Linear(INPUTS, 9), norm, nn.Linear(9, CLASSES))


@pytest.mark.parametrize("make", [Centred, unaccounted])
def test_a_model_whose_samples_interact_is_refused(make):
    model = make()
    guard = Guard(model, optim.SGD(model.parameters()), OGD(10))
    with pytest.raises(ConfigError, match="outputs depend on the other samples of a batch"):
        guard.end_task(task(0))


def test_a_model_of_two_precisions_is_refused():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES).double()

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)).double())

    model, (x, y) = Mixed(), task(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = "parameters must be of one precision, not float32 and float64"
    with pytest.raises(ConfigError, match=message):
        Guard(model, optimizer, OGD(samples=5))
    with pytest.raises(ConfigError, match=message):
        tangent_features(model, x, y)
    with pytest.raises(ConfigError, match=message):
        linearised_forecast(model, (x, y), (x, y), lr=0.1)


def test_inputs_of_another_precision_than_a_layers_are_said_to_be_why():
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(INPUTS, 8).bfloat16(), nn.Linear(8, CLASSES)

        def forward(self, x):
            return self.head(self.body(x.bfloat16()).float())

    model = Half()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), OGD(samples=5))
    with pytest.raises(ConfigError, match="are bfloat16 and float32, and a guard computes with"):
        guard.end_task(task(0))


def test_batch_norm_and_one_remembered_sample_are_refused_before_any_step():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    guard = forgetless.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), AGEM(memory=1))
    with pytest.raises(ConfigError, match="batch norm cannot be trained on one stored sample"):
        guard.end_task((torch.randn(20, 5), torch.randint(0, 3, (20,))))
    assert guard.tasks == 0
