"""Held features as plain tensors with names, for a file; nothing in it can run code."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from forgetless.support.errors import ConfigError
from forgetless.tangent.blocks import Block, Outer, Rows
from forgetless.tangent.factors import Dense, Factor, Left, OneHot, Patches, Right, Window
from forgetless.tangent.features import TangentFeatures
from forgetless.tangent.held import Blocks, Held, same_memory

_LAYOUT = "layout"


def to_tensors(phi: TangentFeatures) -> dict[str, Tensor]:
    """Every tensor of held features, and under "layout" a JSON text that says how they fit."""
    source = phi.source
    if not isinstance(source, Held):
        raise ConfigError("only held features can be stored; call held(phi) first")
    tensors: dict[str, Tensor] = {}
    names: dict[object, str] = {}

    def put(tensor: Tensor) -> str:
        # What a bias shares with its weight is stored once.
        key = same_memory(tensor)
        if key not in names:
            names[key] = str(len(names))
            tensors[names[key]] = tensor.flatten(1)
        return names[key]

    def described(block: Block) -> Any:
        if not isinstance(block, Outer):
            return put(block.rows())
        uses = [[[put(f.data), f.data.shape[1:], _described(f)] for f in use] for use in block.uses]
        return {"shape": block.shape, "uses": uses}

    parts = [
        {"rows": rows, "blocks": {name: described(block) for name, block in blocks.items()}}
        for blocks, rows in source.parts
    ]
    layout = json.dumps({"names": source.names, "sizes": source.sizes, "parts": parts})
    tensors[_LAYOUT] = torch.frombuffer(bytearray(layout.encode()), dtype=torch.uint8)
    return tensors


def from_tensors(tensors: Mapping[str, Tensor], like: Tensor) -> TangentFeatures:
    """The held features again, on the device of `like`; refused if they do not fit together."""
    try:
        layout = json.loads(bytes(tensors[_LAYOUT].cpu().tolist()))
        here = {
            name: t.to(like if t.is_floating_point() else like.device)
            for name, t in tensors.items()
            if name != _LAYOUT
        }
        names, sizes = tuple(layout["names"]), tuple(layout["sizes"])
        parts = []
        for part in layout["parts"]:
            rows = int(part["rows"])
            blocks: Blocks = {n: _block(part["blocks"][n], here, rows, like) for n in names}
            parts.append((blocks, rows))
            if any(blocks[n].size != size for n, size in zip(names, sizes, strict=True)):
                raise ValueError("a layer has another size")
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ConfigError(f"the stored features do not fit together: {error!r}") from error
    return TangentFeatures(Held(names, sizes, like.new_empty(0), tuple(parts)))


def _block(layout: Any, tensors: Mapping[str, Tensor], n: int, like: Tensor) -> Block:
    if isinstance(layout, str):
        if len(tensors[layout]) != n:
            raise ValueError(f"{len(tensors[layout])} rows, not {n}")
        return Rows(tensors[layout])
    uses = []
    for use in layout["uses"]:
        left, right = (tensors[name].view(n, *shape) for name, shape, _ in use)
        uses.append((_left(use[0][2], left), _right(use[1][2], right)))
    g, r, c = layout["shape"]
    return Outer((g, r, c), tuple(uses), like.new_empty(n, 0))


def _described(factor: Factor) -> dict[str, Any]:
    if isinstance(factor, OneHot):
        return {"width": factor.width}
    if isinstance(factor, Patches):
        window = asdict(factor.window)
        return {"groups": factor.groups, "window": window, "positions": factor.positions}
    return {}


def _left(layout: Mapping[str, Any], data: Tensor) -> Left:
    if not layout:
        return Dense(data)
    width = int(layout["width"])
    if data.numel() and not 0 <= int(data.min()) <= int(data.max()) < width:
        raise ValueError(f"tokens outside of [0, {width})")
    return OneHot(data, width)


def _right(layout: Mapping[str, Any], data: Tensor) -> Right:
    if not layout:
        return Dense(data)
    fields: dict[str, Any] = dict(layout["window"])
    mode = str(fields.pop("mode"))
    window = Window(**{name: tuple(value) for name, value in fields.items()}, mode=mode)
    return Patches(data, layout["groups"], window, layout["positions"])
