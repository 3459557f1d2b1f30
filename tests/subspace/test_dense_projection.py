"""Projections away from stored rows, on every path, against two products in float64."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgetless.linalg import project_out
from forgetless.subspace import dense
from forgetless.subspace.dense import aligned, laid_out, project_out_rows

from ..tangent.reference import random

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def without(g: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    return g - (g @ basis.T) @ basis


def plain(g, rows):
    """Two products in float64."""
    exact = rows.double()
    return (g.double() - exact.T @ (exact @ g.double())).to(g)


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 30))
def test_projections_are_idempotent_linear_and_shorten(seed, k, p):
    basis = torch.linalg.qr(random(p, min(k, p), seed=seed))[0].T.unsqueeze(0).contiguous()
    g, h = random(1, p, seed=seed + 1), random(1, p, seed=seed + 2)
    once = project_out_rows(g, basis)
    torch.testing.assert_close(project_out_rows(once, basis), once, rtol=0, atol=1e-12)
    torch.testing.assert_close(once, without(g, basis[0]), rtol=0, atol=1e-12)
    both = project_out_rows(2 * g - h, basis)
    torch.testing.assert_close(both, 2 * once - project_out_rows(h, basis), rtol=0, atol=1e-12)
    assert float(once.norm()) <= float(g.norm()) + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sweeps_over_many_blocks(dtype, monkeypatch):
    rows = torch.linalg.qr(random(2, 40, 13))[0].mT.contiguous().to(dtype)
    g = random(2, 40).float()
    expected = torch.stack([without(a, b) for a, b in zip(g.double(), rows.double(), strict=True)])
    for size in (1, 400, 1 << 22):
        monkeypatch.setattr(dense, "_CACHED", size)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
        found = dense.project_out_rows(g, rows)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
        weights = dense.coefficients(g, rows)
        torch.testing.assert_close(weights, (rows.float() @ g.unsqueeze(2))[..., 0])
        combined = dense.combination(weights, rows)
        torch.testing.assert_close(combined, (weights.unsqueeze(1) @ rows.float())[:, 0])


def test_what_is_not_a_number_stays_so():
    rows, g = torch.randn(100, 6000), torch.randn(1, 6000)
    g[0, 17] = torch.nan
    assert dense.project_out_rows(g, rows.unsqueeze(0)).isnan().all()


def test_strides_gradients_and_other_types_take_the_plain_path():
    torch.manual_seed(0)
    rows = torch.linalg.qr(torch.randn(6000, 100)).Q.T  # columns in memory, not rows
    g = torch.randn(6000)
    expected = plain(g, rows)
    assert torch.allclose(dense.project_out_rows(g[None], rows[None])[0], expected, atol=1e-5)
    rows = rows.contiguous()
    every_other = torch.stack([g, g], 1)[:, 0]
    projected = dense.project_out_rows(every_other[None], rows[None])[0]
    assert torch.allclose(projected, expected, atol=1e-5)
    half = dense.project_out_rows(g[None], rows.bfloat16()[None])[0]
    assert torch.allclose(half, plain(g, rows.bfloat16()), atol=1e-4)
    weights = g.clone().requires_grad_()
    dense.project_out_rows(weights[None], rows[None]).square().sum().backward()
    assert torch.allclose(weights.grad, 2 * expected, atol=1e-4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_projects_without_its_parents_threads():
    """In a process of its own, as forks of one with many threads go."""
    program = """
import os, torch
from forgetless.subspace.dense import project_out_rows
g, rows = torch.randn(1, 6000), torch.randn(1, 100, 6000) / 6000**0.5
expected = project_out_rows(g, rows)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(not torch.allclose(project_out_rows(g, rows), expected, atol=1e-4))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 31, 128, 1001])
def test_rows_lie_at_multiples_of_a_cache_line(size, dtype):
    rows = aligned(torch.empty(2, 0, size, dtype=dtype), 3)
    assert rows.shape == (2, 3, size)
    assert rows.dtype == dtype
    assert not rows.any()
    assert rows.stride(1) * rows.element_size() % 128 == 0


def test_rows_on_a_cpu_are_left_as_they_are():
    rows = torch.randn(2, 3, 5)
    assert laid_out(rows) is rows


@needs_gpu
def test_a_gpu_lays_rows_out_for_the_kernel():
    rows = torch.randn(2, 3, 501, device="cuda")
    found = laid_out(rows)
    assert torch.equal(found, rows)
    if torch.cuda.get_device_capability()[0] == 9:
        from forgetless.subspace.kernels.onepass import project_out_in_one_pass

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
