"""Named parts of a flat vector, and back."""

import pytest
import torch

from forgetless.support.layout import Layout, is_under

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


@pytest.mark.parametrize("start", ["fc1", "fc1.", "fc1.weight", "body.fc1"])
def test_the_beginning_of_a_name_counts_in_whole_parts(start):
    names = ["fc1.weight", "fc10.weight", "fc1x", "body.fc1.weight", "weight"]
    expected = "body.fc1.weight" if start.startswith("body") else "fc1.weight"
    assert [name for name in names if is_under(name, [start])] == [expected]
    assert not any(is_under(name, [""]) for name in names)
    assert not any(is_under(name, []) for name in names)
