"""A state in parts, as sharded models give it, is taken by one process, or refused."""

import pytest
import torch

from forgetless import ConfigError

from .cases import CASES
from .works import first_half

CASE = next(case for case in CASES if case.name == "ddp-ogd")


def in_parts(guard) -> dict[str, torch.Tensor]:
    """The state with each parameter's columns apart, as if gathered from several processes."""
    state = guard.state_dict()
    rows, start = state.pop("memory.directions"), 0
    for name, parameter in CASE.made().named_parameters():
        some = rows[:, start : start + parameter.numel()]
        state[f"memory.directions/{name}"] = some.unflatten(1, parameter.shape)
        start += parameter.numel()
    return state


def test_parts_are_joined():
    _, guard = first_half(CASE, alone=True)
    expected = guard.state_dict()
    _, other = first_half(CASE, alone=True)
    other.load_state_dict(in_parts(guard))
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def _missing(state):
    del state["memory.directions/0.bias"]


def _cut_short(state):
    state["memory.directions/2.weight"] = state["memory.directions/2.weight"][:, :-1]


def _fewer_rows(state):
    for name in [n for n in state if "/" in n]:
        state[name] = state[name][:-1]


def _uneven(state):
    state["memory.directions/4.bias"] = state["memory.directions/4.bias"][1:]


def _scalar(state):
    state["memory.directions/4.bias"] = torch.tensor(1.0)


@pytest.mark.parametrize("harm", [_missing, _cut_short, _fewer_rows, _uneven, _scalar])
def test_damaged_parts_are_refused(harm):
    _, guard = first_half(CASE, alone=True)
    before = guard.state_dict()
    state = in_parts(guard)
    harm(state)
    with pytest.raises(ConfigError, match="the state is damaged"):
        guard.load_state_dict(state)
    for name, tensor in guard.state_dict().items():
        assert torch.equal(tensor, before[name]), name
