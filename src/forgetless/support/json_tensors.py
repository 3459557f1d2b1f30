"""JSON in a tensor of bytes, so that notes are stored and sent among tensors."""

import json
from typing import Any

import torch
from torch import Tensor


def json_tensor(value: Any) -> Tensor:
    """A value as the bytes of its JSON, (n,) uint8; what JSON does not know, as text."""
    text = json.dumps(value, separators=(",", ":"), default=str).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def json_value(tensor: Tensor) -> Any:
    """The value in a tensor that `json_tensor` made."""
    return json.loads(bytes(tensor.cpu().tolist()))
