"""The compiled projection against the plain one."""

import os
import subprocess
import sys

import pytest
import torch

from forgetless.subspace.kernels import compiled, sweep
from forgetless.subspace.kernels.compiled import project_out_compiled


def plain(g, rows):
    """Two products in float64."""
    exact = rows.double()
    return (g.double() - exact.T @ (exact @ g.double())).to(g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 64, 101])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("cached", [True, False])
def test_the_loops_agree_with_two_products(dtype, count, threads, cached, monkeypatch):
    pytest.importorskip("numba")
    if not cached:
        monkeypatch.setattr(compiled, "_CACHED", 0)
    torch.manual_seed(count)
    rows, g = torch.randn(count, 777, dtype=dtype), torch.randn(777, dtype=dtype)
    kept = g.clone()
    projected = project_out_compiled(g, rows, threads)
    expected = plain(g, rows)
    assert (projected - expected).norm() < 30 * torch.finfo(dtype).eps * expected.norm()
    assert torch.equal(g, kept)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("seeds", [1, 3])
def test_projections_with_and_without_it(installed, seeds, monkeypatch):
    if not installed:
        monkeypatch.setattr(sweep, "can_be_compiled", lambda g, rows: False)
    torch.manual_seed(seeds)
    rows = torch.linalg.qr(torch.randn(seeds, 6000, 90)).Q.mT.contiguous()
    g = torch.randn(seeds, 6000)
    expected = torch.stack([plain(one, basis) for one, basis in zip(g, rows, strict=True)])
    assert torch.allclose(sweep.project_out_rows(g, rows), expected, atol=1e-5)


def test_what_is_not_a_number_stays_so():
    rows, g = torch.randn(100, 6000), torch.randn(1, 6000)
    g[0, 17] = torch.nan
    assert sweep.project_out_rows(g, rows.unsqueeze(0)).isnan().all()


def test_strides_gradients_and_other_types_take_the_plain_path():
    torch.manual_seed(0)
    rows = torch.linalg.qr(torch.randn(6000, 100)).Q.T  # columns in memory, not rows
    g = torch.randn(6000)
    expected = plain(g, rows)
    assert torch.allclose(sweep.project_out_rows(g[None], rows[None])[0], expected, atol=1e-5)
    rows = rows.contiguous()
    every_other = torch.stack([g, g], 1)[:, 0]
    projected = sweep.project_out_rows(every_other[None], rows[None])[0]
    assert torch.allclose(projected, expected, atol=1e-5)
    half = sweep.project_out_rows(g[None], rows.bfloat16()[None])[0]
    assert torch.allclose(half, plain(g, rows.bfloat16()), atol=1e-4)
    weights = g.clone().requires_grad_()
    sweep.project_out_rows(weights[None], rows[None]).square().sum().backward()
    assert torch.allclose(weights.grad, 2 * expected, atol=1e-4)


def test_rows_too_long_for_a_cache_are_read_in_pieces():
    torch.manual_seed(0)
    rows = torch.randn(6, 2 * compiled._CACHED // 4 + 321)
    rows /= rows.norm(dim=1, keepdim=True)
    g = torch.randn(rows.shape[1])
    projected = sweep.project_out_rows(g[None], rows[None])[0]
    expected = plain(g, rows)
    assert (projected - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_projects_without_its_parents_threads():
    """In a process of its own, as forks of one with many threads go."""
    program = """
import os, torch
from forgetless.subspace.kernels.sweep import project_out_rows
g, rows = torch.randn(1, 6000), torch.randn(1, 100, 6000) / 6000**0.5
expected = project_out_rows(g, rows)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(not torch.allclose(project_out_rows(g, rows), expected, atol=1e-4))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_how_many_threads_torch_has_stays_as_it_was():
    """Numba would set them for the whole process, and sums round by how many share them."""
    program = """
import torch
from forgetless.subspace.kernels.sweep import project_out_rows
torch.set_num_threads(1)
project_out_rows(torch.randn(1, 6000), torch.randn(1, 100, 6000))
raise SystemExit(torch.get_num_threads() != 1)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
