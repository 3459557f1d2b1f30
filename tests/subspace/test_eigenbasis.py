"""Eigenvectors of large moments against NumPy's."""

import numpy as np
import pytest
import torch

from forgetless.subspace import eigenbasis
from forgetless.subspace.eigenbasis import Axis

D = 60


@pytest.fixture(autouse=True)
def large(monkeypatch):
    monkeypatch.setattr(eigenbasis, "_LARGE", D)


def moment_of(rank, seed=0, decay=-2.0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(max(1, rank), D, dtype=torch.float64, generator=generator)
    rows *= 10 ** torch.linspace(0, decay, max(1, rank), dtype=torch.float64).unsqueeze(1)
    return rows.T @ rows * (rank > 0)


def projector(vectors):
    return vectors @ vectors.mT


@pytest.mark.parametrize("rank", [1, 7, 30, 31, 60])
def test_the_projectors_are_numpys(rank):
    moment = moment_of(rank)
    axis = Axis.of(moment.unsqueeze(0), moment[:0])
    assert axis.vectors.shape == (1, D, rank if rank <= D // 2 else D)
    values, vectors = (t.copy() for t in np.linalg.eigh(moment.numpy()))
    values, vectors = torch.from_numpy(values).flip(0), torch.from_numpy(vectors).flip(1)
    found = axis.values[0, :rank]
    torch.testing.assert_close(found, values[:rank], atol=1e-12 * float(values[0]), rtol=0)
    for count in {1, rank // 2 + 1, rank}:
        torch.testing.assert_close(
            projector(axis.vectors[0, :, :count]), projector(vectors[:, :count]), atol=1e-9, rtol=0
        )
    torch.testing.assert_close(axis.moment()[0], moment, atol=1e-12 * float(values[0]), rtol=0)
    torch.testing.assert_close(axis.trace, moment.trace().view(1))


@pytest.mark.parametrize("rank", [7, 60])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20])
def test_in_float32_they_are_as_orthonormal_as_lapack_makes_them(rank, scale):
    moment = scale * moment_of(rank)
    axis = Axis.of(moment.unsqueeze(0), torch.empty(0))
    vectors = axis.vectors[0].double()
    eye = torch.eye(vectors.shape[1], dtype=torch.float64)
    rounding = D**0.5 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(vectors.T @ vectors, eye, atol=rounding, rtol=0)
    top = float(torch.linalg.eigvalsh(moment)[-1])
    torch.testing.assert_close(axis.moment()[0], moment, atol=2e-6 * top, rtol=0)


def test_seeds_have_what_they_have_alone():
    moments = torch.stack([moment_of(rank, rank) for rank in (3, 20, 0)])
    together = Axis.of(moments, moments[0, :0])
    for seed, count in enumerate((3, 20, 1)):
        alone = Axis.of(moments[seed : seed + 1], moments[0, :0])
        assert torch.equal(together.vectors[seed, :, :count], alone.vectors[0])
        assert torch.equal(together.values[seed, :count], alone.values[0])
        assert not together.vectors[seed, :, count:].any()
    torch.testing.assert_close(together.moment(), moments)


def test_a_mean_of_several_tasks_has_the_rank_of_their_sum_and_no_more_than_all():
    moments = [moment_of(12, seed).unsqueeze(0) for seed in range(6)]
    axis = Axis.of(moments[0], moments[0][0, :0])
    counts = [axis.vectors.shape[2]]
    for task, moment in enumerate(moments[1:], 1):
        axis = axis.averaged(moment, task / (task + 1), 1 / (task + 1))
        counts.append(axis.vectors.shape[2])
    assert counts == [12, 24, D, D, D, D]
    torch.testing.assert_close(axis.moment(), torch.stack(moments).mean(0))


@pytest.mark.parametrize("rank", [*range(1, 60, 7), 60, 200])
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_the_bound_on_the_rank_is_one(rank, mean):
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(rank, D, dtype=torch.float64, generator=generator) + mean
    moment = rows.T @ rows
    tolerance = D * torch.finfo(torch.float64).eps * float(moment.diagonal().max())
    bound = eigenbasis._least_rank(moment, tolerance)
    assert bound <= np.linalg.matrix_rank(moment.numpy()) * (1 + 1e-9)
    if rank == 200:  # close enough to spare the search for a low rank
        assert bound > D / 2
