"""Stacks of rows: where they lie, and the projection by the kernel and without it."""

import pytest
import torch

from forgetless.linalg import orthonormalize, project_out
from forgetless.subspace import DenseSubspace
from forgetless.subspace.rows import aligned, project_out_rows, stacked

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def basis(seeds: int, count: int, size: int, dtype=torch.float64) -> torch.Tensor:
    rows = [orthonormalize(torch.randn(count, size).double()) for _ in range(seeds)]
    empty = torch.empty(seeds, 0, size, dtype=dtype)
    return stacked(empty, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 31, 128, 1001])
def test_rows_lie_at_multiples_of_a_cache_line(size, dtype):
    rows = aligned(torch.empty(2, 0, size, dtype=dtype), 3)
    assert rows.shape == (2, 3, size)
    assert rows.dtype == dtype
    assert not rows.any()
    assert rows.stride(1) * rows.element_size() % 128 == 0


def test_stacking_keeps_what_was_there_and_fills_up_with_zeros():
    old = torch.randn(2, 3, 5)
    rows = stacked(old, [torch.ones(2, 5), torch.ones(1, 5)])
    assert torch.equal(rows[:, :3], old)
    assert torch.equal(rows[:, 3:].sum(2), torch.tensor([[5.0, 5], [5, 0]]))


def test_no_rows_change_nothing():
    g = torch.randn(2, 7)
    assert project_out_rows(g, torch.empty(2, 0, 7)) is g


def test_rows_of_lower_precision_are_multiplied_in_that_of_the_vector():
    torch.manual_seed(0)
    rows = basis(2, 70, 300)
    g = torch.randn(2, 300)
    low = rows.bfloat16()
    expected = project_out(g.double(), low.double())
    torch.testing.assert_close(project_out_rows(g, low).double(), expected, rtol=0, atol=1e-5)


def test_a_subspace_in_bfloat16_protects_to_its_rounding():
    torch.manual_seed(0)
    vectors = torch.randn(2, 20, 500)
    theta = torch.zeros(2, 500)
    state = DenseSubspace.empty(theta, torch.bfloat16).extend(list(vectors[:, :10]))
    state = state.extend(list(vectors[:, 10:]))
    assert state.rows.dtype == torch.bfloat16
    g = vectors.sum(1)
    left = state.project_out(g)
    assert left.dtype == torch.float32
    assert (left.norm(dim=1) / g.norm(dim=1)).max() < 1e-2


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("seeds", "count", "size"),
    [(1, 1, 1), (5, 100, 113_610), (1, 37, 113_610), (3, 5, 500), (40, 3, 4_097), (2, 9, 641_000),
     (150, 2, 700), (2, 3, 3_000_000)],
)  # fmt: skip
def test_the_kernel_agrees_with_two_products(seeds, count, size, dtype):
    g = torch.randn(seeds, size, device="cuda")
    rows = aligned(g.unsqueeze(1).to(dtype), count)
    rows.copy_(torch.randn(seeds, count, size, device="cuda") / size**0.5)
    rows[:, count // 2] = 0
    found = project_out_rows(g, rows)
    expected = project_out(g.double(), rows.double())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    assert torch.equal(found, project_out_rows(g, rows))  # the same in every run


@needs_gpu
def test_not_a_number_comes_out_as_such_and_does_not_hang():
    g = torch.full((2, 5000), torch.nan, device="cuda")
    rows = aligned(g.unsqueeze(1), 4)
    assert project_out_rows(g, rows).isnan().all()


@needs_gpu
def test_the_kernel_can_be_recorded():
    g = torch.randn(2, 5000, device="cuda")
    rows = aligned(g.unsqueeze(1), 4)
    rows.copy_(torch.randn_like(rows) / 5000**0.5)
    expected = project_out_rows(g, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = project_out_rows(g, rows)
    for _ in range(3):
        graph.replay()
    assert torch.equal(found, expected)
