"""Stacks of rows: where they lie, and the projection by the kernel and without it."""

import pytest
import torch

from forgetless.linalg import project_out
from forgetless.subspace.kernels.rows import aligned, laid_out, project_out_in_one_pass
from forgetless.subspace.kernels.sweep import project_out_rows

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 31, 128, 1001])
def test_rows_lie_at_multiples_of_a_cache_line(size, dtype):
    rows = aligned(torch.empty(2, 0, size, dtype=dtype), 3)
    assert rows.shape == (2, 3, size)
    assert rows.dtype == dtype
    assert not rows.any()
    assert rows.stride(1) * rows.element_size() % 128 == 0


def test_a_cpu_has_no_kernel_and_leaves_rows_as_they_are():
    rows = torch.randn(2, 3, 5)
    assert laid_out(rows) is rows
    assert project_out_in_one_pass(torch.randn(2, 5), rows) is None


@needs_gpu
def test_a_gpu_lays_rows_out_for_the_kernel():
    rows = torch.randn(2, 3, 501, device="cuda")
    found = laid_out(rows)
    assert torch.equal(found, rows)
    if torch.cuda.get_device_capability()[0] == 9:
        assert project_out_in_one_pass(torch.randn(2, 501, device="cuda"), found) is not None


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
