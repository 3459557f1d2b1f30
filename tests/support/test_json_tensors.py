"""Plain values go through tensors of bytes unchanged."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from forgetless.support.json_tensors import json_tensor, json_value

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(plain)
def test_there_and_back(value):
    tensor = json_tensor(value)
    assert tensor.dtype == torch.uint8
    assert tensor.dim() == 1
    assert json_value(tensor) == value


def test_what_json_cannot_write_is_written_as_asked():
    assert json_value(json_tensor({"dtype": torch.float32}, default=str)) == {
        "dtype": "torch.float32"
    }
