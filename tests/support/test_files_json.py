"""JSON among tensors."""

import json
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from forgetless.support.files import json_tensor, json_value

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.recursive(LEAVES, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=9))
def test_a_value_comes_back(value):
    tensor = json_tensor(value)
    assert tensor.dtype == torch.uint8
    assert json_value(tensor) == json.loads(bytes(tensor.tolist())) == value


def test_what_json_does_not_know_is_text():
    assert json_value(json_tensor({"folder": Path("runs") / "a"})) == {"folder": "runs/a"}
