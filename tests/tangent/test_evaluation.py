"""Models that compute parts of themselves again in the backward pass."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

import forgetless
from forgetless import AGEM, EWC, GEM, OGD, PCAOGD, SGD, Joint, Training, fit
from forgetless.tangent.evaluation import call_with
from forgetless.theory import linearised_forecast, model_drift
from tests.conftest import blobs

REENTRANT = [None, False, True]  # None: nothing is checkpointed


class Net(nn.Module):
    def __init__(self, reentrant, inputs: int = 6, outputs: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, 8), nn.Linear(8, 8)
        self.last, self.reentrant = nn.Linear(8, outputs), reentrant

    def forward(self, x):
        x = torch.tanh(self.first(x.flatten(1)))

        def part(x):
            return torch.tanh(self.second(x))

        if self.reentrant is None:
            return self.last(part(x))
        return self.last(checkpoint(part, x, use_reentrant=self.reentrant))


def network(tasks, reentrant):
    return lambda: Net(reentrant, torch.Size(tasks.input_shape).numel(), tasks.n_outputs)


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_fit_follows_the_weights_of_now(reentrant, together):
    tasks = blobs(tasks=2, n=84)
    training = Training(lr=0.3, epochs=5, seeds_together=together)
    plain, checkpointed = (
        fit(tasks, SGD(), network(tasks, how), seeds=2, training=training)
        for how in (None, reentrant)
    )
    for name, value in plain.weights(1, 1).items():
        torch.testing.assert_close(checkpointed.weights(1, 1)[name], value)


@pytest.mark.parametrize("method", [AGEM(30), OGD(30)], ids=lambda m: m.name)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_guard_looks_at_the_weights_before_the_step(method, reentrant):
    weights = []
    for how in (None, reentrant):
        torch.manual_seed(0)
        model = Net(how)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        guard = forgetless.Guard(model, optimizer, method)
        x, y = torch.randn(30, 6), torch.randint(0, 3, (30,))
        guard.end_task((x, y))
        for _ in range(10):
            optimizer.zero_grad()
            cross_entropy(model(x.flip(0)), (y + 1) % 3).backward()
            optimizer.step()
        weights.append(parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_features_are_those_of_their_weights_whatever_happens_later(reentrant):
    torch.manual_seed(0)
    model, x, y = Net(reentrant), torch.randn(5, 6), torch.randint(0, 3, (5,))
    right = forgetless.tangent_features(model, x, y, chunk=2).dense()
    phi = forgetless.tangent_features(model, x, y, chunk=2)
    with torch.no_grad():
        model.second.weight.add_(1)
    torch.testing.assert_close(phi.dense(), right)


def test_elsewhere_checkpoints_are_as_they_were():
    """In the user's own code, also while another thread calls a module with other weights."""
    model, x = Net(False), torch.randn(4, 6)
    values = dict(model.named_parameters())
    inside, done = threading.Event(), threading.Event()

    class Slow(Net):
        def forward(self, x):
            inside.set()
            done.wait(10)
            return super().forward(x)

    slow = Slow(False)
    thread = threading.Thread(target=call_with, args=(slow, dict(slow.named_parameters()), (x,)))
    thread.start()
    inside.wait(10)
    runs = []
    model.second.register_forward_hook(lambda *_: runs.append(1))
    model(x).sum().backward()
    assert len(runs) == 2  # forward, and again on the way back
    done.set()
    thread.join()
    call_with(model, values, (x,)).sum().backward()
    assert len(runs) == 3
    model(x).sum().backward()
    assert len(runs) == 5


def twice(dtype=torch.float32):
    """A network with one layer under two names."""
    torch.manual_seed(0)
    block = nn.Linear(6, 6)
    return nn.Sequential(block, nn.Tanh(), block, nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def samples(count=30):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(count, 6, generator=generator),
        torch.randint(0, 3, (count,), generator=generator),
    )


def test_a_value_holds_under_every_name_unless_that_is_named_too():
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    zero, x = torch.zeros(3, 3), torch.randn(2, 3)
    one, two = (layer.bias for layer in tied)
    torch.testing.assert_close(call_with(tied, {"0.weight": zero}, (x,)), two.expand(2, 3))
    torch.testing.assert_close(call_with(tied, {"1.weight": zero}, (x,)), two.expand(2, 3))
    apart = call_with(tied, {"0.weight": zero, "1.weight": torch.eye(3)}, (x,))
    torch.testing.assert_close(apart, (one + two).expand(2, 3))


@pytest.mark.parametrize("method", [OGD(20), PCAOGD(5, 30), EWC(), AGEM(20), GEM(20), Joint()])
def test_a_layer_under_two_names_stays_the_models_own(method):
    """And so goes on being trained."""
    model, (x, y) = twice(), samples()
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = forgetless.Guard(model, optimizer, method)
    guard.end_task((x, y))
    for now, then in zip(model.parameters(), before, strict=True):
        assert now is then
    values = [p.detach().clone() for p in before]
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(model(x + 1), (y + 1) % 3).backward()
        optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(values, before, strict=True))
    guard.end_task((x + 1, y))
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


def test_features_and_forecast_of_a_layer_under_two_names():
    model, (x, y) = twice(torch.float64), samples()
    phi = forgetless.tangent_features(model, x.double(), y).dense()
    for row, output in zip(phi, model(x.double()).gather(1, y[:, None]), strict=True):
        expected = torch.autograd.grad(output.sum(), list(model.parameters()), retain_graph=True)
        torch.testing.assert_close(row, parameters_to_vector(expected))
    found = linearised_forecast(model, (x.double(), y), (x.double() + 1, y), lr=0.1, components=3)
    assert found.protected[0].components == 3
    state = {name: value + 0.1 for name, value in model.state_dict().items()}
    other = twice(torch.float64)
    other.load_state_dict(state)
    moved = model_drift(model, model.state_dict(), state, x.double(), y)
    difference = (other(x.double()) - model(x.double())).gather(1, y[:, None])
    torch.testing.assert_close(moved.abs(), difference[:, 0].abs())


class Cudnns(nn.GRU):
    """Behaves on a CPU as cuDNN does on a GPU: no backward pass in eval mode."""

    def forward(self, *args):
        if not self.training and torch.backends.cudnn.enabled and torch.is_grad_enabled():
            raise AssertionError("cudnn RNN backward can only be called in training mode")
        return super().forward(*args)


class Recurrent(nn.Module):
    def __init__(self, layer=Cudnns) -> None:
        super().__init__()
        self.layer, self.last = layer(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.layer(x.view(len(x), 3, 2))[0][:, -1])


RECURRENT = [
    ("cpu", Cudnns),
    pytest.param(
        "cuda",
        nn.GRU,
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    ),
]


@pytest.mark.parametrize(("device", "layer"), RECURRENT)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    "method", [OGD(20), PCAOGD(5, 30), EWC(), AGEM(20), GEM(20), Joint()], ids=lambda m: m.name
)
def test_recurrent_layers_in_eval_mode_run_without_cudnn(method, mode, device, layer):
    """What a guard remembers is looked at in eval mode, whatever mode the model is in."""
    torch.manual_seed(0)
    model = Recurrent(layer).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = forgetless.Guard(model, optimizer, method)
    x, y = (t.to(device) for t in samples())
    guard.end_task((x, y))
    before = parameters_to_vector(model.parameters()).detach().clone()
    cross_entropy(model(x.flip(0)), y).backward()
    getattr(model, mode)()
    optimizer.step()
    assert (parameters_to_vector(model.parameters()) - before).abs().max() > 1e-4
    assert torch.backends.cudnn.enabled


def test_only_recurrent_layers_in_eval_mode_do():
    enabled = []

    class Noting(Recurrent):
        def forward(self, x):
            enabled.append(torch.backends.cudnn.enabled)
            return super().forward(x)

    model, (x, _) = Noting(nn.GRU), samples()
    values = dict(model.named_parameters())
    call_with(model, values, (x,))
    model.eval()
    call_with(model, values, (x,))
    with torch.no_grad():
        call_with(model, values, (x,))
    model.layer.train()
    call_with(model, values, (x,))
    assert enabled == [True, False, True, True]


def test_fit_trains_recurrent_layers_in_eval_mode():
    tasks = blobs(tasks=2, n=60)
    flat = torch.Size(tasks.input_shape).numel()

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = Cudnns(1, 4, batch_first=True), nn.Linear(4, tasks.n_outputs)

        def forward(self, x):
            return self.last(self.layer(x.view(-1, flat, 1))[0][:, -1])

    training = Training(lr=0.1, epochs=1, eval_mode_after=1)
    assert fit(tasks, SGD(), Network, training=training).accuracy.shape == (1, 2, 2)
