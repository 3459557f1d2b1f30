"""Linear layers of all seeds in one product: the same numbers as vmap's."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from forgetless.training.fast.batched import BatchedLinear, _parts


def outputs_and_gradients(module: nn.Module, values, inputs, mode):
    def run(values, inputs):
        return functional_call(module, values, (inputs,))

    leaves = {n: v.detach().requires_grad_() for n, v in values.items()}
    with mode:
        outputs = vmap(run)(leaves, inputs)
    return outputs, torch.autograd.grad(outputs.square().sum(), list(leaves.values()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inner", [7, 1024, 768])
def test_outputs_and_gradients_are_those_of_vmap(inner, bias):
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(inner, 20, bias=bias), nn.Tanh(), nn.Linear(20, 3)
    ).double()
    values = {n: torch.randn(4, *p.shape).double() for n, p in module.named_parameters()}
    inputs = torch.randn(4, 5, 1, inner).double()
    expected = outputs_and_gradients(module, values, inputs, torch.enable_grad())
    found = outputs_and_gradients(module, values, inputs, BatchedLinear())
    torch.testing.assert_close(found, expected)


def test_other_shapes_are_left_to_vmap():
    module = nn.Linear(6, 2).double()
    values = {n: torch.randn(3, *p.shape).double() for n, p in module.named_parameters()}
    inputs = torch.randn(3, 4, 5, 6).double()
    expected = outputs_and_gradients(module, values, inputs, torch.enable_grad())
    found = outputs_and_gradients(module, values, inputs, BatchedLinear())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("shape", "parts"), [((5, 32, 1024), 8), ((5, 32, 100), 1), ((5, 6000, 1024), 1)]
)
def test_only_small_products_are_cut(shape, parts):
    weight = torch.empty(shape[0], 100, shape[2], device="meta")
    assert _parts(torch.empty(shape, device="meta"), weight) == parts
