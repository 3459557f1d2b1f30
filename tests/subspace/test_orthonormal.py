"""Orthonormal rows without a copy, against those of `linalg`."""

import math

import pytest
import torch

from forgetless.linalg import orthonormalize
from forgetless.subspace import DENSE, DenseSubspace, Storage, orthonormal
from forgetless.subspace.orthonormal import lengths_of_long, orthonormalize_in_place
from forgetless.tangent import tangent_features


@pytest.fixture(autouse=True)
def _few_columns_at_a_time(monkeypatch):
    monkeypatch.setattr(orthonormal, "_CONVERTED", {"cpu": 1000})


def vectors(d: int, p: int, shortest: float = 1e-4) -> torch.Tensor:
    """Of lengths that differ by a factor of ten thousand, or less."""
    generator = torch.Generator().manual_seed(d)
    lengths = torch.logspace(0, math.log10(shortest), d)
    return torch.randn(d, p, generator=generator) * lengths.unsqueeze(1)


@pytest.mark.parametrize(("p", "d", "old"), [(2000, 20, 30), (300, 10, 0), (100, 1, 3)])
def test_it_finds_the_same_space_and_says_how_the_vectors_lie_in_it(p, d, old):
    basis = orthonormalize(vectors(old, p) + 0) if old else torch.empty(0, p)
    given = vectors(d, p)
    new, inside, outside = orthonormalize_in_place(given.clone(), basis)
    expected = orthonormalize(given, against=basis)
    assert new.shape == expected.shape
    every = torch.cat([basis, new])
    torch.testing.assert_close(every @ every.T, torch.eye(len(every)), rtol=0, atol=1e-6)
    torch.testing.assert_close(expected, expected @ new.T @ new, rtol=0, atol=1e-6)
    again = inside @ basis.double() + outside @ new.double()
    lengths = given.double().norm(dim=1, keepdim=True)
    torch.testing.assert_close(again / lengths, given / lengths, rtol=0, atol=1e-6)


def test_vectors_that_add_nothing_are_left_out():
    basis = orthonormalize(vectors(3, 200))
    given = vectors(6, 200)
    given[1] = 2 * basis[0] - basis[2]  # inside the old rows
    given[3] = given[0] + 0.5 * given[2]  # depends on earlier ones
    given[4] = 0
    new, inside, outside = orthonormalize_in_place(given.clone(), basis)
    assert len(new) == 3
    again = inside @ basis.double() + outside @ new.double()
    torch.testing.assert_close(again, given.double(), rtol=0, atol=1e-6)


def test_the_vectors_memory_is_used():
    given = vectors(5, 400)
    new, _, _ = orthonormalize_in_place(given, torch.empty(0, 400))
    assert new.data_ptr() == given.data_ptr()


@pytest.mark.parametrize("storage", [DENSE, Storage(dtype=torch.bfloat16), Storage(max_rank=7)])
def test_a_subspace_in_float32_is_that_of_float64(storage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    g = torch.randn(1, 257)
    states = []
    for dtype in (torch.float32, torch.float64):
        state = DenseSubspace.empty(torch.zeros(1, 257, dtype=dtype), storage)
        for shift in (0.0, 1.0, 1.0):
            # The sixth eigenvalue and the seventh differ by 4e-2 of a largest one of 63: rounding
            # turns a direction by ε · 63 / 4e-2 = 2e-4 at most.
            samples = vectors(9, 30, shortest=1e-2) + shift
            phi = tangent_features(model.to(dtype), samples.to(dtype))
            state = state.add_principal([phi], 6, centred=False)
        states.append(state)
    single, double = states
    assert single.record.ranks.tolist() == double.record.ranks.tolist()
    # The last six lie in the twelve directions before them, of which seven stayed.
    assert single.record.ranks.tolist() == [[6, 6, 0 if storage.max_rank is None else 5]]
    close = 1e-2 if storage.dtype == torch.bfloat16 else 3e-4
    assert single.kept_share() == pytest.approx(double.kept_share(), rel=close)
    projected = double.project_out(g.double()).float()
    torch.testing.assert_close(single.project_out(g), projected, rtol=0, atol=close)


@pytest.mark.parametrize("p", [1, 1023, 1024, 5000])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 2.4e-7), (torch.float64, 1e-15), (torch.bfloat16, 1e-2)]
)
def test_lengths_of_long_rows(p, dtype, close):
    rows = (torch.randn(3, p, generator=torch.Generator().manual_seed(p)) + 1).to(dtype)
    rows[1] = 0
    found = lengths_of_long(rows)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, rows.double().norm(dim=1), rtol=close, atol=0)
    assert lengths_of_long(rows[:, :0]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_rows_whose_squares_float32_cannot_hold(scale):
    given = vectors(4, 3000)
    lengths = scale * given.double().norm(dim=1)
    torch.testing.assert_close(lengths_of_long(scale * given), lengths, rtol=1e-6, atol=0)
    basis = orthonormalize(vectors(3, 3000))
    new, _, outside = orthonormalize_in_place(scale * given, basis)
    expected, _, of_expected = orthonormalize_in_place(given.clone(), basis)
    torch.testing.assert_close(new, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(outside / scale, of_expected, rtol=0, atol=1e-4)


def test_old_rows_in_half_precision():
    """They are only nearly orthonormal; what is new is at right angles to them all the same."""
    given = vectors(20, 2000)
    basis = orthonormalize(vectors(30, 2000)).bfloat16()
    new, inside, outside = orthonormalize_in_place(given.clone(), basis)
    exact = basis.double()
    assert float((new.double() @ exact.T).abs().max()) < 1e-6
    torch.testing.assert_close(new @ new.T, torch.eye(20), rtol=0, atol=1e-6)
    again = inside @ exact + outside @ new.double()
    lengths = given.double().norm(dim=1, keepdim=True)
    torch.testing.assert_close(again / lengths, given / lengths, rtol=0, atol=1e-6)
