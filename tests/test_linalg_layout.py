"""Named parts of a flat vector, and back."""

import pytest
import torch

from forgetless.linalg import Growth, Layout, is_under

LAYOUT = Layout({"weight": (2, 3), "scale": (), "empty": (0, 4), "bias": (2,)})


def test_parts_are_views_in_their_shapes():
    for leading in ((), (4,), (4, 5)):
        vector = torch.randn(*leading, 9)
        parts = LAYOUT.split(vector)
        assert {n: tuple(t.shape) for n, t in parts.items()} == {
            name: (*leading, *shape) for name, shape in LAYOUT.shapes.items()
        }
        assert torch.equal(LAYOUT.join(parts), vector)
        for name, part in parts.items():
            columns = vector[..., LAYOUT.columns[name]]
            assert torch.equal(part.reshape(columns.shape), columns)
        parts["weight"].zero_()
        assert not vector[..., :6].any()


def test_a_missing_part_is_zero():
    parts = LAYOUT.split(torch.ones(3, LAYOUT.size))
    del parts["weight"]
    assert torch.equal(LAYOUT.join(parts), torch.tensor([[0.0] * 6 + [1.0] * 3] * 3))


GROWN = Layout({"new": (2,), "weight": (4, 3), "scale": (), "empty": (1, 4), "bias": (2,)})


def test_values_spread_over_a_network_that_has_grown():
    growth = Growth(LAYOUT, GROWN)
    assert {n: growth.new_rows(n) for n in LAYOUT.shapes} == {
        "weight": 2, "scale": 0, "empty": 1, "bias": 0
    }  # fmt: skip
    values, onto = torch.randn(5, 2, LAYOUT.size), torch.randn(5, 2, GROWN.size)
    before = onto.clone()
    found, parts = GROWN.split(growth.spread(values, onto)), LAYOUT.split(values)
    assert torch.equal(onto, before)
    assert torch.equal(found["weight"][..., :2, :], parts["weight"])
    assert torch.equal(found["weight"][..., 2:, :], GROWN.split(onto)["weight"][..., 2:, :])
    assert torch.equal(found["new"], onto[..., :2])
    for name in ("scale", "bias"):
        assert torch.equal(found[name], parts[name])
    zero = growth.padded(values)
    assert torch.equal(zero[zero != 0], values[values != 0])
    assert int((zero == 0).sum()) == 10 * (GROWN.size - LAYOUT.size)


@pytest.mark.parametrize("start", ["fc1", "fc1.", "fc1.weight", "body.fc1"])
def test_the_beginning_of_a_name_counts_in_whole_parts(start):
    names = ["fc1.weight", "fc10.weight", "fc1x", "body.fc1.weight", "weight"]
    expected = "body.fc1.weight" if start.startswith("body") else "fc1.weight"
    assert [name for name in names if is_under(name, [start])] == [expected]
    assert not any(is_under(name, [""]) for name in names)
    assert not any(is_under(name, []) for name in names)
