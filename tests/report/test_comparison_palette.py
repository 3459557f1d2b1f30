"""The palette: stable colours of methods, that all readers can tell apart."""

from itertools import combinations

import numpy as np
import pytest

from forgetless.methods import METHODS
from forgetless.report.comparison import DARK, LIGHT, colour, dash, marker, places, symbol

# What is left of linear RGB without one kind of cone (Machado, Oliveira and Fernandes, 2009).
VISION = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
# Linear RGB to cones and cones to Oklab (Ottosson, 2020), in which distances are perceived ones.
CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
OKLAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def linear(code: str) -> np.ndarray:
    values = np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(code: str, paper: str) -> float:
    light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in (code, paper))
    return light[1] / light[0]


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(("colours", "paper"), [(LIGHT, "#ffffff"), (DARK, "#1a1f24")])
def test_any_two_colours_differ_for_every_reader(colours, paper, vision):
    seen = [np.clip(VISION[vision] @ linear(code), 0, 1) for code in colours]
    perceived = [OKLAB @ np.cbrt(CONES @ light) for light in seen]
    assert min(np.linalg.norm(a - b) for a, b in combinations(perceived, 2)) > 0.075
    assert min(contrast(code, paper) for code in colours) > 2.2


def test_a_method_has_its_colour_in_any_company():
    assert len(LIGHT) == len(DARK)
    assert places(list(METHODS)) == list(range(len(METHODS)))
    assert places(["pca-ogd", "sgd"]) == [list(METHODS).index("pca-ogd"), 0]


def test_methods_beyond_the_palette_have_the_colours_of_absent_ones():
    late = list(METHODS)[len(LIGHT) :]
    found = places(["sgd", "ewc", *late])
    assert len({colour(place) for place in found}) == len(found)
    assert not any(map(dash, found))


def test_other_settings_and_other_methods_have_the_colours_of_absent_ones():
    found = places(["ogd", "ogd", "own", "sgd", "own"])
    assert found[0] == list(METHODS).index("ogd")
    assert found[3] == 0
    assert len({colour(place) for place in found}) == 5
    assert not any(map(dash, found))


def test_many_entries_are_told_apart_by_dashes():
    found = places(["own"] * 3 * len(LIGHT))
    assert len({(colour(place), dash(place)) for place in found}) == len(found)
    for shape in (marker, symbol):
        assert len({shape(place) for place in found[: len(LIGHT)]}) == len(LIGHT)
