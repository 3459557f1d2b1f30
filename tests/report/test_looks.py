"""Looks of methods: stable, and told apart on a thin line by all readers."""

from itertools import combinations

import numpy as np
import pytest

from forgetless.methods import METHODS, Method
from forgetless.report.looks import DARK, LIGHT, Look, family_of, looks, method_colour

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
# Linear sRGB to CIE XYZ under D65, the white of which is the sum of each row.
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
     [0.0193339, 0.1191920, 0.9503041]]
)  # fmt: skip
PAPERS = {"light": (LIGHT, "#ffffff"), "dark": (DARK, "#1a1f24")}  # the card of the page
LEAST = 11.5  # CIEDE2000; the palette before had 8.3


def linear(code: str) -> np.ndarray:
    values = np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear sRGB."""
    x, y, z = (
        np.cbrt(v) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116
        for v in XYZ @ np.clip(rgb, 0, 1) / XYZ.sum(1)
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def ciede2000(one: np.ndarray, other: np.ndarray) -> float:
    """ΔE00 of two colours in CIELAB (Sharma, Wu and Dalal, 2005)."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    c = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 0.5 * (1 - np.sqrt(c**7 / (c**7 + 25**7)))
    a1, a2 = (1 + g) * a1, (1 + g) * a2
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = np.degrees(np.arctan2([b1, b2], [a1, a2])) % 360
    turn = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    h = h1 + h2 if c1 * c2 == 0 else (h1 + turn / 2) % 360
    length = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    lm, c = (l1 + l2) / 2, (c1 + c2) / 2
    t = 1 - 0.17 * np.cos(np.radians(h - 30)) + 0.24 * np.cos(np.radians(2 * h))
    t += 0.32 * np.cos(np.radians(3 * h + 6)) - 0.20 * np.cos(np.radians(4 * h - 63))
    lightness = (l2 - l1) / (1 + 0.015 * (lm - 50) ** 2 / np.sqrt(20 + (lm - 50) ** 2))
    chroma, hue = (c2 - c1) / (1 + 0.045 * c), length / (1 + 0.015 * c * t)
    rotation = -np.sin(np.radians(60 * np.exp(-(((h - 275) / 25) ** 2))))
    rotation *= 2 * np.sqrt(c**7 / (c**7 + 25**7))
    return float(np.sqrt(lightness**2 + chroma**2 + hue**2 + rotation * chroma * hue))


def contrast(code: str, paper: str) -> float:
    light = sorted(float(linear(c) @ XYZ[1]) + 0.05 for c in (code, paper))
    return light[1] / light[0]


# From the table that the authors of the formula publish to test implementations.
@pytest.mark.parametrize(
    ("one", "other", "published"),
    [
        ([50, 2.6772, -79.7751], [50, 0, -82.7485], 2.0425),
        ([50, -1.3802, -84.2814], [50, 0, -82.7485], 1.0000),
        ([50, 2.4900, -0.0010], [50, -2.4900, 0.0009], 7.1792),
        ([50, 2.5, 0], [73, 25, -18], 27.1492),
        ([60.2574, -34.0099, 36.2677], [60.4626, -34.1751, 39.4387], 1.2644),
        ([22.7233, 20.0904, -46.6940], [23.0331, 14.9730, -42.5619], 2.0373),
        ([2.0776, 0.0795, -1.1350], [0.9033, -0.0636, -0.5514], 0.9082),
    ],
)
def test_the_distance_is_the_published_one(one, other, published):
    assert ciede2000(np.array(one), np.array(other)) == pytest.approx(published, abs=6e-5)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("paper", PAPERS)
def test_any_two_colours_differ_for_every_reader(paper, vision):
    colours, ground = PAPERS[paper]
    seen = {code: lab(VISION[vision] @ linear(code)) for code in colours}
    assert len(seen) == len(LIGHT) == len(DARK)
    assert min(ciede2000(a, b) for a, b in combinations(seen.values(), 2)) > LEAST
    assert min(contrast(code, ground) for code in colours) > 2.2


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("paper", PAPERS)
def test_a_line_that_covers_half_of_each_pixel_is_told_too(paper, vision):
    """Between two rows of pixels, browsers and matplotlib mix the codes of line and paper."""
    colours, ground = PAPERS[paper]
    mixed = [
        "#" + bytes((a + b) // 2 for a, b in zip(*map(bytes.fromhex, (c[1:], ground[1:])))).hex()
        for c in colours
    ]
    seen = [lab(VISION[vision] @ linear(code)) for code in mixed]
    assert min(ciede2000(a, b) for a, b in combinations(seen, 2)) > 4


@pytest.mark.parametrize("paper", PAPERS)
def test_the_methods_of_the_demo_differ_more_for_every_reader(paper):
    colours, _ = PAPERS[paper]
    found = looks(["sgd", "ewc", "a-gem", "ogd", "pca-ogd"])
    assert not any(look.dash for look in found)
    rgb = [linear(colours[look.place]) for look in found]
    for kind in VISION.values():
        seen = [lab(kind @ one) for one in rgb]
        assert min(ciede2000(a, b) for a, b in combinations(seen, 2)) > 15


def test_a_method_has_its_look_in_any_company():
    everything = dict(zip(METHODS, looks(list(METHODS)), strict=True))
    assert len(set(everything.values())) == len(METHODS)
    for some in (["pca-ogd", "sgd"], ["gem", "own", "gpm", "gem", "ewc"]):
        for number, look in enumerate(looks(some)):
            if some[number] in METHODS and some[number] not in some[:number]:
                assert look == everything[some[number]]
    assert method_colour("sgd") == LIGHT[0]


def hue(code: str) -> float:
    _, a, b = lab(linear(code))
    return float(np.degrees(np.arctan2(b, a)) % 360)


def test_a_family_has_a_hue():
    """Each family's colours lie within 75 degrees, and no other family's lie among them."""
    by_family: dict[str, list[float]] = {}
    for family in ("projection", "penalty", "replay", "other"):
        for look in looks(["own"] * 3, [family] * 3):
            by_family.setdefault(family, []).append(hue(look.colour))
    ranges = {
        family: (np.median(hues), max(abs((h - np.median(hues) + 180) % 360 - 180) for h in hues))
        for family, hues in by_family.items()
    }
    assert all(width < 40 for _, width in ranges.values())
    for (one, wide), (other, broad) in combinations(ranges.values(), 2):
        assert abs((one - other + 180) % 360 - 180) > max(wide, broad)


def test_other_settings_of_a_method_stay_in_its_family():
    first, second, third, sgd, own = looks(["ogd", "ogd", "ogd", "sgd", "own"])
    family = {look.place for look in looks(["own"] * 3, ["projection"] * 3)}
    assert {first.place, second.place, third.place} == family
    assert len({first, second, third, sgd, own}) == 5
    assert not any(look.dash for look in (first, second, third, sgd, own))


def test_a_new_method_has_a_look_by_its_declaration(monkeypatch):
    class Mine(Method):
        name = "mine"
        family = "replay"

    monkeypatch.setitem(METHODS, "mine", Mine)
    before = looks([name for name in METHODS if name != "mine"])
    *same, new = looks(list(METHODS))
    assert same == before
    assert new not in before
    assert family_of(Mine) == "replay"
    assert hue(new.colour) == pytest.approx(hue(method_colour("a-gem")), abs=40)


def test_what_a_trace_says_of_its_method_is_enough():
    """A method of a script is not imported for a report."""
    one, other = looks(["mine", "yours"], ["penalty", "unheard of"])
    assert one.place in {look.place for look in looks(["own"] * 3, ["penalty"] * 3)}
    assert other.place in {look.place for look in looks(["own"] * 3)}


def test_many_entries_are_told_apart_by_dashes():
    found = looks(["own"] * 50)
    assert len(set(found)) == 50
    assert len({(look.colour, look.dash) for look in found}) == 50
    for shape in ("marker", "symbol"):
        assert len({getattr(look, shape) for look in map(Look, range(14))}) == 14
        alike = [Look(3, dashed) for dashed in range(4)]
        assert len({getattr(look, shape) for look in alike}) == 4


def test_more_entries_than_looks_are_drawn_all_the_same():
    assert len(looks(["own"] * 80)) == 80
