"""Storages: what is accepted, and how they are named."""

import pytest
import torch

from forgetless import ConfigError, Storage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_rank": 0}, "max_rank must be a whole number of at least 1, or None, not 0"),
        ({"max_rank": 2.5}, "max_rank must be a whole number"),
        ({"max_rank": "ten"}, "max_rank must be a whole number .*, not 'ten'"),
        ({"max_rank": True}, "max_rank must be a whole number"),
        ({"kind": "sparse"}, "storage must be 'dense' or 'factored', not 'sparse'"),
        ({"dtype": torch.int8}, "dtype must be a floating-point type, not torch.int8"),
        ({"dtype": "bfloat16"}, "dtype must be a floating-point type, not 'bfloat16'"),
        ({"device": "cpu"}, "device must be a torch.device or None, not 'cpu'"),
        ({"kind": "factored", "dtype": torch.bfloat16}, "storage must be factored as it is"),
    ],
)
def test_storages_that_cannot_be(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Storage(**arguments)


def test_storages_in_words():
    assert str(Storage()) == "dense rows"
    assert str(Storage("factored")) == "factored samples"
    there = Storage(dtype=torch.bfloat16, device=torch.device("cpu"))
    assert str(there) == "dense rows in bfloat16 on cpu"
