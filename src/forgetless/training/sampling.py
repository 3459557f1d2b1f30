"""Random choices of samples and random changes of images, one stream for each seed."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from forgetless.data import Split
from forgetless.methods import Samples
from forgetless.support.plugins import load_object
from forgetless.support.streams import random_subset
from forgetless.support.validation import ConfigError


def choose_indices(count: int, available: int, generators: Sequence[torch.Generator]) -> Tensor:
    """For each seed a random choice without replacement, (S, min(count, available))."""
    draws = [torch.randperm(available, generator=g)[:count] for g in generators]
    return torch.stack(draws)


def batch_of(split: Split, index: Tensor, task: int) -> Samples:
    """The samples of a task at index (S, n)."""
    inputs, labels = split.take(index)
    return Samples(inputs, labels, torch.full_like(labels, task))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; a GPU is not waited for."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@final
class Sampler:
    """Random batches of stored samples for each seed, drawn when asked for or ahead of that.

    Either way a seed's generator draws the same numbers in the same order.

    Arguments:
        generators: one for each seed.
        device: where the choices are wanted.

    Attributes:
        asked: the draws of the latest step: how many samples, among how many.
        coming: the choices drawn ahead, for the next steps, (steps, S · Σ count).
    """

    def __init__(self, generators: Sequence[torch.Generator], device: torch.device) -> None:
        self.generators = generators
        self.device = device
        self.asked: list[tuple[int, int]] = []
        self.coming = self.blank(0)
        self._given: Iterator[Tensor] | None = None

    def __call__(self, count: int, available: int) -> Tensor:
        """A choice of `count` among those available, for each seed, (S, count)."""
        if self._given is not None:
            return next(self._given)
        self.asked.append((count, available))
        return torch.stack([random_subset(count, available, g) for g in self.generators]).to(
            self.device
        )

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step, with choices drawn ahead if there are any."""
        if len(self.coming):
            with self.handing_out(self.take(1)):
                yield
        else:
            self.asked.clear()
            yield

    def ahead(self, steps: int) -> None:
        """Draw for the next steps, on the assumption that they ask for what the latest one did."""
        if not self.asked or not steps:
            return

        def of_seed(generator: torch.Generator) -> Tensor:
            return torch.stack(
                [
                    torch.cat([random_subset(m, n, generator) for m, n in self.asked])
                    for _ in range(steps)
                ]
            )

        with ThreadPoolExecutor(len(self.generators)) as pool:
            drawn = torch.stack(list(pool.map(of_seed, self.generators)), dim=1)
        choices = drawn.split([count for count, _ in self.asked], dim=2)  # (steps, S, count) each
        self.coming = to_device(torch.cat([c.flatten(1) for c in choices], dim=1), self.device)

    def blank(self, steps: int) -> Tensor:
        """Room for the choices of some steps, (steps, S · Σ count)."""
        numbers = len(self.generators) * sum(count for count, _ in self.asked)
        return torch.zeros(steps, numbers, dtype=torch.long, device=self.device)

    def take(self, steps: int) -> Tensor:
        """Remove and return the choices of the next steps, (steps, S · Σ count)."""
        taken, self.coming = self.coming[:steps], self.coming[steps:]
        return taken

    @contextmanager
    def handing_out(self, choices: Tensor) -> Iterator[None]:
        """In the block calls return these choices, (steps, S · Σ count), in order."""
        seeds = len(self.generators)
        lengths = [seeds * count for count, _ in self.asked] * len(choices)
        parts = choices.flatten().split(lengths) if lengths else ()
        self._given = (part.view(seeds, -1) for part in parts)
        try:
            yield
        finally:
            self._given = None


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
