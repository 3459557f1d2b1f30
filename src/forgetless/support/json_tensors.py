"""Plain values as tensors of bytes, to be stored next to other tensors."""

import json
from typing import Any

import torch
from torch import Tensor


def json_tensor(value: Any, **options: Any) -> Tensor:
    """A value as JSON, (bytes,).

    Arguments:
        value: the value.
        options: of `json.dumps`.
    """
    text = json.dumps(value, separators=(",", ":"), **options).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).clone()


def json_value(tensor: Tensor) -> Any:
    """The value of a `json_tensor`."""
    return json.loads(bytes(tensor.cpu().tolist()))
