"""Random changes of training images, drawn for each seed by itself."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from forgetless.support.errors import ConfigError
from forgetless.support.imports import load_object

Augment = Callable[[Tensor, torch.Generator], Tensor]


def crop(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image (n, c, h, w) by up to an eighth of its height and width, zeros outside."""
    n, _, height, width = images.shape
    shifts = [torch.randint(2 * (side // 8) + 1, (n,), generator=generator).to(images.device)
              for side in (height, width)]  # fmt: skip
    padded = pad(images, (width // 8, width // 8, height // 8, height // 8))
    rows = shifts[0].unsqueeze(1) + torch.arange(height, device=images.device)
    columns = shifts[1].unsqueeze(1) + torch.arange(width, device=images.device)
    number = torch.arange(n, device=images.device)[:, None, None]
    # Indices on both sides of the channels put these last.
    return padded[number, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image (n, c, h, w) left to right, or not."""
    flipped = torch.randint(2, (len(images),), generator=generator).bool().to(images.device)
    return torch.where(flipped[:, None, None, None], images.flip(3), images)


AUGMENTATIONS: dict[str, tuple[Augment, ...]] = {
    "": (),
    "crop": (crop,),
    "flip": (flip,),
    "crop-flip": (crop, flip),
}


def augmented(inputs: Tensor, augment: Any, generators: Sequence[torch.Generator]) -> Tensor:
    """The inputs (S, n, *), changed at random.

    Arguments:
        inputs: of the present batch.
        augment: a name of AUGMENTATIONS, "file.py:function", or a function of a seed's inputs
            (n, *) and a generator that returns inputs of the same shape.
        generators: one for each seed.
    """
    named = isinstance(augment, str) and augment in AUGMENTATIONS
    if named and inputs.dim() != 5:
        shape = tuple(inputs.shape[2:])
        raise ConfigError(
            f"augmentation={augment!r} is for images (c, h, w), not inputs of {shape}"
        )
    if named:
        changes: Sequence[Any] = AUGMENTATIONS[augment]
    else:
        changes = (load_object(augment, "augmentation") if isinstance(augment, str) else augment,)
    rows = []
    for row, generator in zip(inputs, generators, strict=True):
        changed = row
        for change in changes:
            changed = change(changed, generator)
        if not isinstance(changed, Tensor) or changed.shape != row.shape:
            came = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ConfigError(f"augmentation must return inputs of {tuple(row.shape)}, not {came}")
        rows.append(changed)
    return torch.stack(rows)
