"""Test images as small pictures inside a page."""

import base64
import io
from collections.abc import Sequence
from typing import Literal, final

import torch
from PIL import Image
from torch import Tensor

from forgetless.report.analysis.analysis import Images, Sample

_MOST_BYTES = 400_000  # of all pictures of a run: a page of five runs stays small


@final
class Gallery:
    """Collects pictures of test images, each once, up to a total size.

    Arguments:
        shape: of an input; only (1 or 3, height, width) is an image.
    """

    most = 8  # of each kind and task

    def __init__(self, shape: Sequence[int]) -> None:
        self.possible = len(shape) == 3 and shape[0] in (1, 3)
        self.images = Images()
        self._bytes = 0

    def add(
        self,
        kind: Literal["endangered", "forgotten"],
        task: int,
        test: tuple[Tensor, Tensor],
        index: Tensor,
        outputs: Tensor,
        classes: range,
    ) -> None:
        """Add the samples at `index` of a task's test set, with the class the network gives them.

        Arguments:
            test: inputs (n, c, h, w) and labels (n,).
            outputs: of the samples at `index`, (m, C); the largest within `classes` is the guess.
        """
        if not self.possible:
            return
        inputs, labels = test
        found = []
        for number, output in zip(index.tolist(), outputs, strict=True):
            name = f"{task + 1}.{number + 1}"
            if name not in self.images.pictures:
                picture = _data_url(inputs[number], float(inputs.min()), float(inputs.max()))
                if self._bytes + len(picture) > _MOST_BYTES:
                    break
                self._bytes += len(picture)
                self.images.pictures[name] = picture
            guess = classes.start + int(output[classes.start : classes.stop].argmax())
            found.append(Sample(name, int(labels[number]), guess))
        getattr(self.images, kind)[str(task)] = found


def _data_url(image: Tensor, low: float, high: float) -> str:
    """A PNG file of an image (c, h, w) with values from low to high."""
    scaled = ((image - low) / max(high - low, 1e-12) * 255).round().clamp(0, 255).to(torch.uint8)
    pixels = scaled.permute(1, 2, 0).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(
        file, "PNG", optimize=True
    )
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
