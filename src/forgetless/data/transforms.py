"""Image transforms of the benchmarks, each for a whole set of images at once."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor


def pad(images: Tensor, pixels: int) -> Tensor:
    """Images (n, c, h, w) with a black border of that many pixels."""
    return pad_tensor(images, (pixels,) * 4)


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """(x / 255 − mean) / std per channel: uint8 (n, c, h, w) → float32."""
    shape = (-1, 1, 1)
    centre, scale = (torch.tensor(values).view(shape) for values in (mean, std))
    # In place: asking the system for memory takes longer than the arithmetic.
    return images.to(torch.float32, copy=True).div_(255).sub_(centre).div_(scale)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Images (n, c, h, w) turned counter-clockwise about their centre, nearest neighbour.

    Where an output pixel comes from is the same for all images: one table, one gather. What comes
    from outside is black.
    """
    height, width = images.shape[-2:]
    angle = math.radians(degrees % 360)
    cos, sin = math.cos(angle), math.sin(angle)
    y, x = torch.meshgrid(
        torch.arange(height, dtype=torch.float64) + 0.5 - height / 2,
        torch.arange(width, dtype=torch.float64) + 0.5 - width / 2,
        indexing="ij",
    )
    # y points down, so turning the image counter-clockwise looks up pixels clockwise. Rounding to
    # 1e-9 keeps right angles from falling on the wrong side of a pixel's edge.
    column = (cos * x - sin * y + width / 2).mul(1e9).round().div(1e9).floor().long()
    row = (sin * x + cos * y + height / 2).mul(1e9).round().div(1e9).floor().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    source = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).flatten()
    turned = images.flatten(-2)[..., source].view_as(images)
    return turned * inside.to(images.dtype)
