"""Random crops and flips, against slices."""

import pytest
import torch
from torch.nn.functional import pad

from forgetless import SGD, ConfigError, Training, fit, scenario
from forgetless.support.streams import stream
from forgetless.training.sampling import augmented, crop, flip
from tests.conftest import blobs


def images(n=50, height=8, width=16):
    return torch.randn(n, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_a_crop_is_a_slice_of_the_padded_image():
    batch = images()
    found = crop(batch, stream(0, "test"))
    padded = pad(batch, (2, 2, 1, 1))
    used = set()
    for image, whole in zip(found, padded, strict=True):
        slices = {
            (i, j): torch.equal(image, whole[:, i : i + 8, j : j + 16])
            for i in range(3)
            for j in range(5)
        }
        assert sum(slices.values()) == 1
        used.add(max(slices, key=slices.get))
    assert len(used) > 10  # of fifteen


def test_a_flip_mirrors_about_half_of_the_images():
    batch = images(400)
    found = flip(batch, stream(0, "test"))
    kept = (found == batch).flatten(1).all(1)
    mirrored = (found == batch.flip(3)).flatten(1).all(1)
    assert bool((kept ^ mirrored).all())
    assert 150 < int(mirrored.sum()) < 250


def test_seeds_draw_for_themselves():
    batch = images().expand(2, -1, -1, -1, -1)
    both = augmented(batch, "crop-flip", [stream(0, "test"), stream(1, "test")])
    assert torch.equal(augmented(batch[:1], "crop-flip", [stream(1, "test")])[0], both[1])
    assert not torch.equal(both[0], both[1])


def test_training_sees_the_changes_and_evaluation_does_not():
    tasks = scenario("rotated-digits", tasks=1, train_per_class=10)
    seen = []

    def zeros(inputs, generator):
        seen.append(inputs.shape)
        return torch.zeros_like(inputs)

    training = Training(lr=0.5, epochs=3, augmentation=zeros)
    fit(tasks, SGD(), seeds=2, training=training)
    assert len(seen) == 2 * 3 * 4
    plain = fit(tasks, SGD(), training=Training(lr=0.5, epochs=3))
    flipped = fit(tasks, SGD(), training=Training(lr=0.5, epochs=3, augmentation="flip"))
    name = "head.weight"
    assert not torch.equal(plain.weights(0, 0)[name], flipped.weights(0, 0)[name])


def test_inputs_that_are_no_images():
    with pytest.raises(ConfigError, match=r"augmentation='crop' is for images .* of \(6,\)"):
        fit(blobs(), SGD(), training=Training(augmentation="crop"))


def test_a_function_that_changes_the_shape():
    with pytest.raises(ConfigError, match=r"augmentation must return inputs of \(24, 6\)"):
        fit(blobs(), SGD(), training=Training(augmentation=lambda x, g: x[:, :3]))
