"""The compiled projection against the plain one."""

import subprocess
import sys

import pytest
import torch

from forgetless.subspace import dense

pytest.importorskip("numba")
from forgetless.subspace.kernels import compiled


def plain(g, rows):
    """Two products in float64."""
    exact = rows.double()
    return (g.double() - exact.T @ (exact @ g.double())).to(g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 64, 101])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("cached", [True, False])
def test_the_loops_agree_with_two_products(dtype, count, threads, cached, monkeypatch):
    if not cached:
        monkeypatch.setattr(compiled, "_CACHED", 0)
    torch.manual_seed(count)
    rows, g = torch.randn(count, 777, dtype=dtype), torch.randn(777, dtype=dtype)
    kept = g.clone()
    projected = compiled.project_out_compiled(g, rows, threads)
    expected = plain(g, rows)
    assert (projected - expected).norm() < 30 * torch.finfo(dtype).eps * expected.norm()
    assert torch.equal(g, kept)


@pytest.fixture
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("seeds", [1, 3])
def test_projections_with_and_without_it(installed, seeds, monkeypatch):
    if not installed:
        monkeypatch.setattr(dense, "_compiled", lambda: None)
    torch.manual_seed(seeds)
    rows = torch.linalg.qr(torch.randn(seeds, 6000, 90)).Q.mT.contiguous()
    g = torch.randn(seeds, 6000)
    expected = torch.stack([plain(one, basis) for one, basis in zip(g, rows, strict=True)])
    assert torch.allclose(dense.project_out_rows(g, rows), expected, atol=1e-5)


@pytest.mark.usefixtures("_two_threads")
def test_rows_too_long_for_a_cache_are_read_in_pieces():
    torch.manual_seed(0)
    rows = torch.randn(6, 2 * compiled._CACHED // 4 + 321)
    rows /= rows.norm(dim=1, keepdim=True)
    g = torch.randn(rows.shape[1])
    projected = dense.project_out_rows(g[None], rows[None])[0]
    expected = plain(g, rows)
    assert (projected - expected).norm() < 1e-6 * expected.norm()


def test_how_many_threads_torch_has_stays_as_it_was():
    """Numba would set them for the whole process, and sums round by how many share them."""
    program = """
import torch
from forgetless.subspace.dense import project_out_rows
torch.set_num_threads(3)
project_out_rows(torch.randn(1, 6000), torch.randn(1, 100, 6000))
raise SystemExit(torch.get_num_threads() != 3)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
