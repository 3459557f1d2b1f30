"""Held features as plain tensors with names, for a file; nothing in it can run code."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from forgetless.errors import ConfigError
from forgetless.tangent.blocks import Block, Outer, Rows
from forgetless.tangent.factors import Dense, Factor, Left, OneHot, Patches, Right, Window
from forgetless.tangent.features import TangentFeatures
from forgetless.tangent.held import Blocks, Held

_LAYOUT = "layout"


def to_tensors(phi: TangentFeatures) -> dict[str, Tensor]:
    """Every tensor of held features, and under "layout" a JSON text that says how they fit."""
    source = phi.source
    if not isinstance(source, Held):
        raise ConfigError("only held features can be stored; call held(phi) first")
    tensors: dict[str, Tensor] = {}
    parts = []
    for number, (blocks, rows) in enumerate(source.parts):
        layout: dict[str, Any] = {}
        for name, block in blocks.items():
            key = f"{number}.{name}"
            if isinstance(block, Rows):
                tensors[key] = block.values
                layout[name] = None
            elif isinstance(block, Outer):
                uses = []
                for u, use in enumerate(block.uses):
                    for side, factor in zip("lr", use, strict=True):
                        tensors[f"{key}.{u}{side}"] = factor.data
                    uses.append([_described(factor) for factor in use])
                layout[name] = {"shape": block.shape, "uses": uses}
        parts.append({"rows": rows, "blocks": layout})
    layout_text = json.dumps({"names": source.names, "sizes": source.sizes, "parts": parts})
    tensors[_LAYOUT] = torch.frombuffer(bytearray(layout_text.encode()), dtype=torch.uint8)
    return tensors


def from_tensors(tensors: Mapping[str, Tensor], like: Tensor) -> TangentFeatures:
    """The held features again, on the device of `like`."""
    try:
        layout = json.loads(bytes(tensors[_LAYOUT].cpu().tolist()))
        parts = []
        for number, part in enumerate(layout["parts"]):
            rows = int(part["rows"])
            blocks: Blocks = {
                name: _block(f"{number}.{name}", of, tensors, rows, like)
                for name, of in part["blocks"].items()
            }
            parts.append((blocks, rows))
        names, sizes = tuple(layout["names"]), tuple(layout["sizes"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"the stored features do not fit together: {error!r}") from error
    return TangentFeatures(Held(names, sizes, like.new_empty(0), tuple(parts)))


def _block(
    key: str, layout: Mapping[str, Any] | None, tensors: Mapping[str, Tensor], n: int, like: Tensor
) -> Block:
    if layout is None:
        return Rows(tensors[key].to(like))
    uses = []
    for u, (left, right) in enumerate(layout["uses"]):
        data = (tensors[f"{key}.{u}{side}"].to(like.device) for side in "lr")
        uses.append((_left(left, next(data)), _right(right, next(data))))
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
    return OneHot(data, layout["width"]) if layout else Dense(data)


def _right(layout: Mapping[str, Any], data: Tensor) -> Right:
    if not layout:
        return Dense(data)
    fields: dict[str, Any] = dict(layout["window"])
    mode = str(fields.pop("mode"))
    window = Window(**{name: tuple(value) for name, value in fields.items()}, mode=mode)
    return Patches(data, layout["groups"], window, layout["positions"])
