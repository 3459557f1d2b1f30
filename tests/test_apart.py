"""Work for several seeds at once gives what one after the other gives."""

import pytest
import torch

from forgetless.apart import for_each

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def solved(matrix):
    values, vectors = torch.linalg.eigh(matrix @ matrix.T)
    return float(values[-1]), vectors[:, -1].abs()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_in_order_and_the_same(device, count):
    generator = torch.Generator().manual_seed(0)
    items = [torch.randn(60, 80, generator=generator).to(device) for _ in range(count)]
    found = for_each(solved, items, torch.device(device))
    for (value, vector), item in zip(found, items, strict=True):
        expected, direction = solved(item)
        assert value == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(vector, direction, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_what_breaks_for_one_is_raised(device):
    def one(number):
        if number == 2:
            raise ValueError("two")
        return number

    with pytest.raises(ValueError, match="two"):
        for_each(one, [0, 1, 2], torch.device(device))


@needs_gpu
def test_what_was_started_before_is_done_before():
    """Each stream waits for the work that its item comes from, and is waited for."""
    for _ in range(20):
        items = [torch.zeros(1 << 22, device="cuda") for _ in range(5)]
        for item in items:
            for _ in range(20):
                item += 1
        found = for_each(lambda item: item * 2, items, torch.device("cuda"))
        del items
        assert all(bool((value == 40).all()) for value in found)


@needs_gpu
def test_gradients_are_recorded_only_where_they_were():
    weight = torch.ones(3, device="cuda", requires_grad=True)
    with torch.no_grad():
        found = for_each(lambda k: (k * weight).sum(), [1.0, 2.0], torch.device("cuda"))
    assert not any(value.requires_grad for value in found)
