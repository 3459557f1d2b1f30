"""Rotation against Pillow, and the arithmetic of the rest."""

import numpy as np
import pytest
import torch
from PIL import Image

from forgetless.data.transforms import normalize, pad, rotate


@pytest.mark.parametrize("shape", [(32, 32), (8, 8), (9, 12)])
@pytest.mark.parametrize("degrees", [0, 5, 20, 45, 70, 90, 180, 270, -30, 123.4, 365])
def test_rotation_is_pillows(shape, degrees):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (3, 2, *shape), dtype=torch.uint8, generator=generator)
    turned = rotate(images, degrees)
    for ours, image in zip(turned.flatten(0, 1), images.flatten(0, 1), strict=True):
        theirs = np.asarray(Image.fromarray(image.numpy()).rotate(degrees))
        # Pillow rounds coordinates to 1/65536, which may decide a tie the other way.
        assert (ours.numpy() != theirs).sum() <= 1


def test_rotation_is_counter_clockwise():
    image = torch.zeros(1, 1, 3, 3, dtype=torch.uint8)
    image[0, 0, 1, 2] = 255  # right
    assert rotate(image, 90)[0, 0, 0, 1] == 255  # up


def test_padding_is_black_and_even():
    padded = pad(torch.ones(2, 1, 28, 28, dtype=torch.uint8), 2)
    assert padded.shape == (2, 1, 32, 32)
    assert padded.sum() == 2 * 28 * 28


def test_normalization_is_per_channel():
    images = torch.full((1, 2, 1, 1), 255, dtype=torch.uint8)
    result = normalize(images, (0.5, 0.0), (0.25, 2.0))
    torch.testing.assert_close(result.flatten(), torch.tensor([2.0, 0.5]))
