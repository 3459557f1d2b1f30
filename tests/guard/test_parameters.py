"""What is protected, and what happens when only some of it can move."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

from forgetless import EWC, OGD, PCAOGD, ConfigError, Guard

from ..tangent import networks as net
from ..tangent.reference import by_loop
from .problems import basis_of, exact_basis, flat, guarded, mlp, seeded, task, train, wander

ALL = ("0.weight", "0.bias", "2.weight", "2.bias")
# What is asked for → the names that are protected.
CHOICES = {
    "nothing said": (lambda m: {}, ALL),
    "a name": (lambda m: {"params": "0.bias"}, ("0.bias",)),
    "a prefix": (lambda m: {"params": "2"}, ALL[2:]),
    "names": (lambda m: {"params": ["2.bias", "0"]}, ("2.bias", "0.weight", "0.bias")),
    "a module": (lambda m: {"params": m[0]}, ALL[:2]),
    "modules": (lambda m: {"params": [m[0], m[2]]}, ALL),
    "a module and a name": (lambda m: {"params": [m[2], "0.bias"]}, (*ALL[2:], "0.bias")),
    "a parameter": (lambda m: {"params": m[0].weight}, ("0.weight",)),
    "parameters": (lambda m: {"params": iter([m[2].bias, m[0].bias])}, ("2.bias", "0.bias")),
    "a function": (lambda m: {"params": lambda n: n.endswith("weight")}, ALL[::2]),
    "an excluded name": (lambda m: {"exclude": ["2"]}, ALL[:2]),
    "an excluded string": (lambda m: {"exclude": "2.bias"}, ALL[:3]),
    "both": (lambda m: {"params": "2", "exclude": ["2.bias"]}, ("2.weight",)),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_of_parameters(choice):
    """The rest is as free as without a guard, and what is chosen does not leak."""
    options, names = CHOICES[choice]
    model = mlp()
    model, optimizer, guard = guarded(model, method=OGD(samples=3), **options(model))
    assert guard.names == names
    twin = mlp()
    other = optim.SGD(twin.parameters(), lr=0.1)
    wander(model, optimizer, 0)
    wander(twin, other, 0)
    for (name, mine), free in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, free) == (name not in names), name
    assert set(guard.stats().layers) == set(names)


def test_an_optimizer_of_some_parameters():
    model = mlp()
    guard = Guard(model, optim.SGD(model[2].parameters()), OGD())
    assert guard.names == ALL[2:]


def test_a_tied_parameter_is_chosen_and_excluded_by_either_name():
    model = seeded(net.tied_embedding)
    names = [n for n, _ in model.named_parameters()]
    assert names == ["tokens.weight", "out.bias"]
    optimizer = optim.SGD(model.parameters())
    assert Guard(model, optimizer, OGD(), params="out").names == ("tokens.weight", "out.bias")
    other = optim.SGD(model.parameters())
    assert Guard(model, other, OGD(), exclude=["out.weight"]).names == ("out.bias",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"params": "layer7"},
            "params must be names or prefixes of names, such as '0.weight', not",
        ),
        ({"params": []}, "params must name at least one parameter, and is empty"),
        ({"params": 5}, "params must be names, modules, parameters, .* or a function of the name"),
        ({"params": [3]}, "params must be names or parameters, not int"),
        ({"params": nn.Linear(2, 2)}, r"params has a tensor \(2, 2\) not of this model"),
        ({"params": lambda name: False}, "there is nothing to protect: none of the chosen"),
        ({"exclude": ["head"]}, "exclude must be names of parameters or beginnings of them"),
        ({"exclude": ["0", "2"]}, "there is nothing to protect"),
        ({"exclude": 3}, "exclude must be names of parameters .*, not 3"),
        ({"exclude": [nn.Linear(1, 1)]}, "exclude must be names of parameters"),
    ],
)
def test_choices_that_cannot_be(options, message):
    model = mlp()
    with pytest.raises(ConfigError, match=message):
        Guard(model, optim.SGD(model.parameters()), OGD(), **options)


def test_parameters_that_are_not_real_numbers():
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="the parameter phase must be of real numbers, not"):
        Guard(model, optim.SGD(model.parameters()), OGD())


def nearest(step: torch.Tensor, rows: torch.Tensor, movable: torch.Tensor) -> torch.Tensor:
    """The nearest step within the movable coordinates with rows · step = 0, by a dense SVD."""
    inside = step.double() * movable
    basis = basis_of(rows.double() * movable)
    return inside - (inside @ basis.T) @ basis


def movement(model, optimizer, number: int = 0) -> torch.Tensor:
    before = flat(model)
    wander(model, optimizer, number)
    return flat(model) - before


FREEZE = {
    "first layer": lambda m: m[0].requires_grad_(False),
    "last weight": lambda m: m[2].weight.requires_grad_(False),
    "all but a bias": lambda m: [p.requires_grad_(p is m[2].bias) for p in m.parameters()],
    "all but the biases": lambda m: [p.requires_grad_(p.dim() == 1) for p in m.parameters()],
}


@pytest.mark.parametrize("storage", ["dense", "factored"])
@pytest.mark.parametrize("freeze", FREEZE)
@pytest.mark.parametrize("method", [OGD(1000), PCAOGD(components=12)], ids=["ogd", "pca-ogd"])
def test_frozen_after_a_task(freeze, storage, method):
    """Nothing protected changes, nothing frozen moves, and the step is the nearest such one."""
    make = partial(optim.Adam, lr=1e-2)
    model, optimizer, guard = guarded(optimizer=make, storage=storage, method=method)
    rows = exact_basis(model, *task(0))
    if method.name == "pca-ogd":
        features = by_loop(mlp().double(), *task(0, dtype=torch.float64))
        rows = torch.linalg.svd(features, full_matrices=False)[2][:12]
    FREEZE[freeze](model)
    movable = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in model.parameters()])
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.requires_grad_(mine.requires_grad)
    free = movement(twin, make(twin.parameters()))
    delta = movement(model, optimizer)
    assert not delta[~movable].any()
    assert float((rows @ delta).norm()) <= 1e-5 * float(free.norm())
    expected = nearest(free, rows, movable)
    torch.testing.assert_close(delta, expected, rtol=0, atol=2e-5 * float(free.norm()))
    # And again when all can move.
    model.requires_grad_(True)
    for number in range(3):
        delta = movement(model, optimizer, number)
        assert delta[~movable].any()
        assert float((rows @ delta).norm()) <= 1e-5 * float(delta.norm())
    assert guard.stats().steps == 4


def test_a_frozen_parameter_is_not_protected_unless_chosen():
    model = mlp()
    model[0].requires_grad_(False)
    assert Guard(model, optim.SGD(model.parameters()), OGD()).names == ALL[2:]
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD(samples=1000), params=lambda name: True)
    assert guard.names == ALL
    guard.end_task(task(0))
    model.requires_grad_(True)
    rows = exact_basis(model, *task(0))
    delta = movement(model, optimizer)
    assert float((rows @ delta).norm()) <= 1e-5 * float(delta.norm())


def test_a_stale_gradient_of_a_frozen_parameter():
    """Torch's optimizers go on moving what has a gradient, frozen or not; it must not leak."""
    model, optimizer, _ = guarded(optimizer=partial(optim.Adam, lr=1e-2))
    rows = exact_basis(model, *task(0))
    wander(model, optimizer, 0)
    model.requires_grad_(False)
    before = flat(model)
    optimizer.step()
    delta = flat(model) - before
    assert delta.any()
    assert float((rows @ delta).norm()) <= 1e-5 * float(delta.norm())


class TwoHeads(nn.Module):
    """A body and two heads, of which one is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 20)
        self.heads = nn.ModuleList([nn.Linear(20, 4), nn.Linear(20, 4)])
        self.used = 0

    def forward(self, x):
        return self.heads[self.used](torch.tanh(self.body(x)))


@pytest.mark.parametrize("storage", ["dense", "factored"])
def test_a_head_that_is_not_used_does_not_move(storage):
    model = seeded(TwoHeads)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    guard = Guard(model, optimizer, OGD(samples=1000), storage=storage)
    guard.end_task(task(0))
    rows = exact_basis(model, *task(0))
    old = {n: p.clone() for n, p in model.heads[0].named_parameters()}
    model.used = 1
    for number in range(5):
        delta = movement(model, optimizer, number)
        assert float((rows @ delta).norm()) <= 1e-5 * float(delta.norm())
        for name, value in model.heads[0].named_parameters():
            assert torch.equal(value, old[name])
    # Features of both heads from now on.
    guard.end_task(task(1))
    model.used = 0
    both = torch.cat([rows, exact_features_of_other_head(model)])
    delta = movement(model, optimizer)
    assert float((basis_of(both) @ delta).norm()) <= 1e-5 * float(delta.norm())


def exact_features_of_other_head(model):
    model.used = 1
    rows = exact_basis(model, *task(1))
    model.used = 0
    return rows


def test_changing_patterns_of_use_do_not_pile_up():
    model, optimizer, guard = guarded(method=OGD(5))
    parameters = list(model.parameters())
    for pattern in range(1, 16):
        optimizer.zero_grad()
        x, y = task(1)
        cross_entropy(model(x), y).backward()
        for i, p in enumerate(parameters):
            if not pattern >> i & 1:
                p.grad = None
        optimizer.step()
    assert len(guard._steps._restricted) <= 8


def test_another_optimizer_that_has_fewer_parameters():
    """What it does not train stays where it is, gradient or not."""
    model, _, guard = guarded()
    rows = exact_basis(model, *task(0))
    head_only = optim.SGD(model[2].parameters(), lr=0.1)
    guard.attach(head_only)
    body = model[0].weight.clone()
    before = flat(model)
    train(model, head_only, task(1), steps=3)
    assert torch.equal(model[0].weight, body)
    delta = flat(model) - before
    assert float((rows @ delta).norm()) <= 1e-5 * float(delta.norm())


def test_a_group_with_a_learning_rate_of_zero_stays():
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer = optim.Adam(groups, lr=1e-2)
    guard = Guard(model, optimizer, OGD(samples=1000))
    guard.end_task(task(0))
    body = model[0].weight.clone()
    train(model, optimizer, task(1), steps=3)
    assert torch.equal(model[0].weight, body)


def test_gradients_that_are_not_there_stay_absent():
    model, optimizer, _ = guarded(method=EWC(strength=3.0))
    model[0].requires_grad_(False)
    old = model[0].weight.clone()
    train(model, optimizer, task(1), steps=3)
    assert model[0].weight.grad is None
    assert torch.equal(model[0].weight, old)


class Odd(nn.Module):
    """A single number, a parameter of no numbers, one that nothing uses, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.idle = nn.Parameter(torch.ones(2))
        self.layer = nn.Linear(12, 4)
        self.register_buffer("shift", torch.tensor([0.1, 0.2, 0.3, 0.4]))

    def forward(self, x):
        return self.scale * torch.tanh(self.layer(x)) + self.shift + self.none.sum()


@pytest.mark.parametrize("storage", ["dense", "factored"])
def test_parameters_of_odd_shapes(storage):
    model = seeded(Odd)
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, OGD(samples=10), storage=storage)
    guard.end_task((task(0)[0][:10], task(0)[1][:10]))
    rows = exact_basis(model, task(0)[0][:10], task(0)[1][:10])
    for number in range(5):
        delta = movement(model, optimizer, number)
        assert float((rows @ delta).norm()) <= 1e-5 * float(delta.norm())
    assert guard.names == ("scale", "none", "idle", "layer.weight", "layer.bias")
    assert torch.equal(model.idle, torch.ones(2))
    assert torch.equal(model.shift, torch.tensor([0.1, 0.2, 0.3, 0.4]))
    again = Guard(model, optim.Adam(model.parameters()), OGD(), storage=storage)
    again.load_state_dict(guard.state_dict())
    assert guard.stats().layers["none"] == 0.0


class Slightly(nn.Module):
    """A parameter that moves the first input's output a little."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, bias=False)
        self.tiny = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.layer(x) + 1e-4 * x[:, :1] * self.tiny


@pytest.mark.parametrize("storage", ["dense", "factored"])
def test_a_direction_of_which_little_can_move_is_not_taken_for_rounding(storage):
    model = Slightly()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    guard = Guard(model, optimizer, OGD(), storage=storage)
    guard.end_task((torch.eye(3)[:2],))
    model.layer.requires_grad_(False)
    model.tiny.sum().backward()
    optimizer.step()
    # Only `tiny` can move, and it moves the first sample's output, if only by 1e-4.
    assert abs(model.tiny.item()) < 1e-3


def test_weight_norm_gives_a_layer_parameters_that_no_rule_knows():
    make = lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(12, 9)), nn.Tanh(), nn.Linear(9, 4))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = seeded(make)
    model, optimizer, guard = guarded(model, storage="factored")
    assert "0.weight_g" in guard.names
    rows = exact_rows_of(model, *task(0))
    delta = movement(model, optimizer)
    assert float((basis_of(rows) @ delta).norm()) <= 1e-5 * float(delta.norm())


def exact_rows_of(model, x, y):
    """Float32 autograd, for models that cannot be copied."""
    rows = []
    for i in range(len(x)):
        grads = torch.autograd.grad(model(x[i : i + 1])[0, y[i]], list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)
