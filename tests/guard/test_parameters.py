"""What is protected, and what happens when only some of it can move."""

import warnings

import pytest
import torch
from torch import nn, optim

from forgetless import OGD, ConfigError, Guard

from ..tangent import networks as net
from .problems import basis_of, exact_basis, guarded, mlp, movement, seeded, task, wander

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


def test_a_quantised_model_is_rejected_unless_adapters_are_trained():
    """As transformers and bitsandbytes make it: eight-bit weights, real norms and biases."""
    model = mlp()
    model.is_quantized = True
    Guard(model, optim.SGD(model.parameters(), lr=0.1)).remove()  # only loaded from such a file
    eight = torch.zeros(model[0].weight.shape, dtype=torch.int8)
    model[0].weight = nn.Parameter(eight, requires_grad=False)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"quantised \(0.weight is int8\).*train adapters"):
        Guard(model, optimizer, OGD(samples=3))
    model.peft_config = {}
    assert Guard(model, optimizer, OGD(samples=3)).names == ALL[1:]


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
