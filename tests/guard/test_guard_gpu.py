"""Guards of methods in an eigenbasis: in float32, and on a GPU, the weights are a CPU's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from forgetless import GPM, SGP, Guard, KFACLaplace, KronEWC, KronOGD

METHODS = {
    "kron-ogd": KronOGD(energy=0.9, samples=64),
    "kron-ogd by itself": KronOGD(samples=64),
    "kron-ewc": KronEWC(samples=64),
    "gpm": GPM(threshold=0.9, samples=64),
    "sgp": SGP(threshold=0.9, samples=64),
    "laplace": KFACLaplace(samples=64),
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    # Fused steps of tiny gradients are rounding / eps.
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4),
}


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(144, 20), nn.Tanh(),
            nn.LayerNorm(20), nn.Linear(20, 3),
        )  # fmt: skip


def task(number, dtype):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(64, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(3, (64,), generator=generator)


def weights_after_three_tasks(method, optimizer, device, dtype, guarded=True):
    model = network().to(device, dtype)
    steps = OPTIMIZERS[optimizer](model.parameters())
    guard = Guard(model, steps, copy.deepcopy(method)) if guarded else None
    for number in range(3):
        x, y = (t.to(device) for t in task(number, dtype))
        for first in range(0, 64, 16):
            steps.zero_grad()
            cross_entropy(model(x[first : first + 16]), y[first : first + 16]).backward()
            steps.step()
        if guard is not None:
            guard.end_task((x, y))
    found = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu().double()
    if guard is not None:
        guard.remove()
    return found


@pytest.mark.filterwarnings("ignore:the protected directions leave no room")  # of a tiny network
@pytest.mark.parametrize(
    ("name", "optimizer", "device"),
    [
        *(pytest.param(n, o, "cuda", marks=needs_gpu) for n in METHODS for o in OPTIMIZERS),
        ("kron-ogd", "adamw", "cpu"),  # float32 alone is another thing there
        ("kron-ewc", "sgd", "cpu"),
    ],
)
def test_the_weights_are_those_of_a_cpu(name, optimizer, device):
    expected = weights_after_three_tasks(METHODS[name], optimizer, "cpu", torch.float64)
    found = weights_after_three_tasks(METHODS[name], optimizer, device, torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    plain = weights_after_three_tasks(
        METHODS[name], optimizer, device, torch.float64, guarded=False
    )
    assert float((found - plain).abs().max()) > 1e-4
    single = weights_after_three_tasks(METHODS[name], optimizer, device, torch.float32)
    torch.testing.assert_close(single, expected, atol=2e-3, rtol=0)
