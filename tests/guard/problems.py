"""What the tests of the guard share: small problems, a loop of one's own, leaks measured apart."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from forgetless import OGD, Guard

from ..tangent.reference import by_loop

INPUTS, CLASSES = 12, 4


def seeded(make, seed: int = 0):
    """What `make` gives with torch's global generator seeded, and left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def mlp(hidden: int = 40) -> nn.Module:
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(INPUTS, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES)
    )
    return seeded(layers)


def task(number: int = 0, n: int = 30, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    centres = 2 * torch.randn(CLASSES, INPUTS, generator=generator)
    y = torch.arange(n) % CLASSES
    x = centres[y] + torch.randn(n, INPUTS, generator=generator)
    return x.to(dtype), y


def flat(model: nn.Module, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.cat([p.detach().flatten().to(dtype) for p in model.parameters()])


def exact_basis(model: nn.Module, x: Tensor, y: Tensor | None) -> Tensor:
    """Orthonormal rows that span the samples' features, by autograd in float64, one by one."""
    exact = copy.deepcopy(model).double().eval()
    rows = by_loop(exact, x.double() if x.is_floating_point() else x, y)
    return basis_of(rows)


def basis_of(rows: Tensor) -> Tensor:
    _, values, vectors = torch.linalg.svd(rows.double(), full_matrices=False)
    return vectors[values > 1e-6 * values[0]]


def guarded(model=None, optimizer=None, method=None, data=None, **options):
    """A model with one task remembered, all of its samples: model, optimizer, guard."""
    model = mlp() if model is None else model
    make = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1))
    made = make(model.parameters())
    guard = Guard(model, made, method or OGD(samples=1000), **options)
    guard.end_task(task(0) if data is None else data)
    return model, made, guard


def train(
    model, optimizer, data, steps: int = 1, batch: int = 10, seed: int = 0, guard=None
) -> None:
    """The user's own loop; the guard, if given, sees the batches if its method needs them."""
    x, y = data
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        index = torch.randint(len(x), (batch,), generator=generator)
        if guard is not None and guard.method.needs_batch:
            guard.observe((x[index], y[index]))
        optimizer.zero_grad()
        cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()


def wander(model, optimizer, number: int) -> None:
    """A step on samples of which some have wrong labels, so that steps do not grow small."""
    generator = torch.Generator().manual_seed(number)
    x, y = task(1)
    index = torch.randint(len(x), (10,), generator=generator)
    wrong = torch.rand(10, generator=generator) < 0.4
    y = torch.where(wrong, torch.randint(CLASSES, (10,), generator=generator), y[index])
    optimizer.zero_grad()
    cross_entropy(model(x[index]), y).backward()
    optimizer.step()


def leaks(model: nn.Module, basis: Tensor, steps, *, count: int):
    """For each step: ‖V Δθ‖ / ‖Δθ‖, and what rounding the weights to float32 can make of it.

    Every weight is rounded by up to ε |θ| / 2, in no direction in particular.
    """
    k, p = basis.shape
    eps = torch.finfo(torch.float32).eps
    before = flat(model)
    found = []
    for number in range(count):
        steps(number)
        after = flat(model)
        delta = after - before
        length = float(delta.norm())
        if length:
            rounding = eps * float(after.norm()) * (k / p) ** 0.5 / length
            found.append((float((basis @ delta).norm()) / length, rounding))
        before = after
    assert len(found) > count // 2
    return found


def movement(model, optimizer, number: int = 0) -> torch.Tensor:
    before = flat(model)
    wander(model, optimizer, number)
    return flat(model) - before
