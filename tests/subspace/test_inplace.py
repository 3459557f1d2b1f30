"""Orthonormal rows without a copy, against those of `linalg`."""

import pytest
import torch

from forgetless.linalg import orthonormalize
from forgetless.subspace import DENSE, DenseSubspace, Storage, dense, inplace
from forgetless.subspace.inplace import orthonormalize_in_place
from forgetless.tangent import tangent_features


@pytest.fixture(autouse=True)
def _few_columns_at_a_time(monkeypatch):
    monkeypatch.setattr(inplace, "_EXACT", 1000)


def vectors(d: int, p: int) -> torch.Tensor:
    """Of lengths that differ by a factor of ten thousand."""
    generator = torch.Generator().manual_seed(d)
    return torch.randn(d, p, generator=generator) * torch.logspace(0, -4, d).unsqueeze(1)


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
def test_a_subspace_of_large_vectors_is_that_of_small_ones(storage, monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    tasks = [tangent_features(model, vectors(9, 30) + shift) for shift in (0.0, 1.0, 1.0)]
    small = large = DenseSubspace.empty(torch.zeros(1, 257), storage)
    for phi in tasks:
        small = small.add_principal([phi], 6, centred=False)
    monkeypatch.setattr(dense, "_LARGE", 0)
    for phi in tasks:
        large = large.add_principal([phi], 6, centred=False)
    assert small.record.ranks.tolist() == large.record.ranks.tolist()
    assert storage.max_rank is not None or large.record.ranks.tolist() == [[6, 6, 0]]
    g = torch.randn(1, 257, generator=torch.Generator().manual_seed(0))
    close = 1e-2 if storage.dtype == torch.bfloat16 else 1e-4
    assert small.kept_share() == pytest.approx(large.kept_share(), rel=close)
    torch.testing.assert_close(small.project_out(g), large.project_out(g), rtol=0, atol=close)
