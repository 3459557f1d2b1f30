"""Leading eigenpairs of Gram matrices against NumPy and LAPACK."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgetless.tangent import spectrum, tangent_features
from forgetless.tangent.features import _precise_enough, _straightened
from forgetless.tangent.spectrum import (
    chebyshev_eigenpairs,
    leading_eigenpairs,
    orthonormal_columns,
    top_eigenpairs,
)

from .reference import random

N = 1100


def with_spectrum(values: torch.Tensor) -> torch.Tensor:
    basis = torch.linalg.qr(random(N, len(values)))[0]
    return (basis * values) @ basis.T


@pytest.fixture
def lapack(monkeypatch):
    """How often the whole matrix was handed to LAPACK."""
    calls = []

    def counted(*args, **options):
        calls.append(args)
        return top_eigenpairs(*args, **options)

    monkeypatch.setattr(spectrum, "top_eigenpairs", counted)
    return calls


@given(st.integers(0, 99), st.integers(1, 10), st.integers(1, 10))
def test_top_eigenpairs_are_those_of_numpy(seed, n, count):
    root = random(n, n + 2, seed=seed)
    gram = root @ root.T
    values, vectors = top_eigenpairs(gram, count)
    expected = np.linalg.eigvalsh(gram.numpy())[::-1]
    expected = expected[expected > 1e-7 * expected[0]][:count]
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-9)
    torch.testing.assert_close(gram @ vectors, vectors * values, atol=1e-8, rtol=0)


def test_top_eigenpairs_leave_noise_out():
    root = random(10, 3)
    for count in (None, 8):
        values, vectors = top_eigenpairs(root @ root.T, count)
        assert values.shape == (3,)
        assert vectors.shape == (10, 3)
    assert top_eigenpairs(torch.zeros(4, 4), 2)[0].shape == (0,)


def test_what_is_noise_depends_on_the_precision_of_the_vectors():
    gram = torch.diag(torch.tensor([1.0, 1e-9, 1e-30], dtype=torch.float64))
    assert len(top_eigenpairs(gram, None, dtype=torch.float32)[0]) == 1
    assert len(top_eigenpairs(gram, None, dtype=torch.float64)[0]) == 2


# eigenvalues → whether the Krylov space is enough
SPECTRA = {
    "decay": (torch.arange(1, N + 1).double() ** -2, True),
    "low rank": (torch.linspace(1, 2, 70).double(), False),
    "all the same": (torch.ones(N).double(), True),
    "more equal ones than a block holds": (
        torch.cat([torch.full((60,), 3.0), torch.linspace(0, 1, N - 60)]).double(),
        False,
    ),
    "slow decay": (torch.linspace(1, 1.2, N).double(), False),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_they_are_those_of_lapack(name, lapack):
    eigenvalues, is_krylov = SPECTRA[name]
    gram = with_spectrum(eigenvalues)
    values, vectors = leading_eigenpairs(gram, 30)
    expected = eigenvalues.sort(descending=True)[0][:30]
    torch.testing.assert_close(values, expected, rtol=1e-11, atol=0)
    torch.testing.assert_close(gram @ vectors, vectors * values, rtol=0, atol=1e-9)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(30).double(), rtol=0, atol=1e-11)
    assert (lapack == []) == is_krylov


def test_small_matrices_and_all_eigenvalues_are_for_lapack(lapack):
    gram = with_spectrum(torch.arange(1, N + 1).double() ** -2)
    leading_eigenpairs(gram, None)
    leading_eigenpairs(gram, N // 5)
    leading_eigenpairs(gram[:50, :50], 3)
    assert len(lapack) == 3


def test_an_eigenvector_that_was_missed_is_noticed():
    gram = with_spectrum(torch.arange(1, N + 1).double() ** -2)
    values, vectors = top_eigenpairs(gram, 20)
    assert not spectrum._missed_one(gram, values, vectors)
    for missing in (0, 7):
        kept = [i for i in range(20) if i != missing]
        assert spectrum._missed_one(gram, values[kept], vectors[:, kept])


def test_directions_that_lost_their_right_angles_get_them_back():
    rows = torch.linalg.qr(random(40, 6))[0].T
    bent = rows + 1e-4 * random(6, 40, seed=1)
    found = _straightened(bent)
    torch.testing.assert_close(found @ found.T, torch.eye(6).double(), rtol=0, atol=1e-13)
    first = bent[0] / bent[0].norm()  # the best determined direction stays
    torch.testing.assert_close(found[0], first, rtol=0, atol=1e-13)
    assert (found - rows).abs().max() < 1e-3


def test_float32_products_find_the_directions_of_float64():
    """Even those that explain a millionth of the variance."""
    scales = torch.logspace(0, -3, 40).double()
    samples = random(N, 40) * scales
    model = torch.nn.Linear(40, 1, bias=False)
    single = tangent_features(model, samples.float()).top(30)
    double = tangent_features(model.double(), samples).top(30)
    torch.testing.assert_close(single[0].double(), double[0], rtol=1e-4, atol=0)
    outside = double[1] - (double[1] @ single[1].double().T) @ single[1].double()
    assert float(torch.linalg.matrix_norm(outside[:25], 2)) < 1e-3


def test_one_long_sample_does_not_drown_the_others():
    """Its rounding is small beside what is found, though n times as much would not be."""
    samples = random(900, 120)
    samples[3] *= 100
    model = torch.nn.Linear(120, 1, bias=False)
    single = tangent_features(model, samples.float()).top(100)
    double = tangent_features(model.double(), samples).top(100)
    torch.testing.assert_close(single[0].double(), double[0], rtol=1e-4, atol=0)


def test_rounding_is_not_taken_for_directions(lapack, monkeypatch):
    """As LAPACK's eigenpairs are left out where they are noise, so are those of the filter."""
    monkeypatch.setattr(spectrum, "_krylov_eigenpairs", chebyshev_eigenpairs)
    noise = 1e-8 * torch.arange(1, N - 19).double() ** -2
    gram = with_spectrum(torch.cat([torch.linspace(1, 2, 20).double(), noise]))
    assert len(leading_eigenpairs(gram, 30, dtype=torch.float32)[0]) == 20
    assert len(leading_eigenpairs(gram, 30, dtype=torch.float64)[0]) == 30
    assert lapack == []


def test_products_that_are_rounded_further_are_not_trusted(monkeypatch):
    like = torch.empty(0)
    assert _precise_enough(like).dtype == torch.float32
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert _precise_enough(like).dtype == torch.float64


@pytest.mark.parametrize("name", SPECTRA)
def test_filtering_finds_them_or_says_that_it_cannot(name):
    """What a GPU does in place of a Krylov space, here on a CPU."""
    eigenvalues, _ = SPECTRA[name]
    gram = with_spectrum(eigenvalues)
    found = chebyshev_eigenpairs(gram, 30, 1e-7)
    assert (found is None) == (name == "slow decay")
    if found is not None:
        values, vectors = found
        expected = eigenvalues.sort(descending=True)[0][:30]
        torch.testing.assert_close(values, expected, rtol=1e-11, atol=0)
        torch.testing.assert_close(gram @ vectors, vectors * values, rtol=0, atol=1e-6)
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(30).double(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("smallest", [1e-3, 1e-12])
def test_columns_become_orthonormal_by_products_alone(smallest, monkeypatch):
    left, right = (torch.linalg.qr(random(n, 20))[0] for n in (N, 20))
    block = (left * torch.logspace(0, torch.tensor(smallest).log10(), 20).double()) @ right.T
    monkeypatch.setattr(torch.linalg, "qr", None)
    basis = orthonormal_columns(block)
    torch.testing.assert_close(basis.T @ basis, torch.eye(20).double(), rtol=0, atol=1e-13)
    torch.testing.assert_close(basis @ (basis.T @ block), block, rtol=0, atol=1e-13)


def test_columns_that_depend_on_others_become_orthonormal_too():
    block = random(N, 20)
    block[:, 5] = block[:, 3]
    block[:, 7] = 0
    basis = orthonormal_columns(block)
    torch.testing.assert_close(basis.T @ basis, torch.eye(20).double(), rtol=0, atol=1e-13)
    torch.testing.assert_close(basis @ (basis.T @ block), block, rtol=0, atol=1e-12)


def test_several_matrices_go_through_the_filter_together():
    names = ("decay", "low rank", "all the same")
    grams = torch.stack([with_spectrum(SPECTRA[name][0]) for name in names])
    values, vectors = chebyshev_eigenpairs(grams, 30, 1e-7)
    assert values.shape == (3, 30)
    assert vectors.shape == (3, N, 30)
    for name, gram, some, of_them in zip(names, grams, values, vectors, strict=True):
        expected = SPECTRA[name][0].sort(descending=True)[0][:30]
        torch.testing.assert_close(some, expected, rtol=1e-11, atol=0)
        torch.testing.assert_close(gram @ of_them, of_them * some, rtol=0, atol=1e-6)
    ranks = torch.stack([with_spectrum(torch.ones(r).double()) for r in (30, 90)])
    assert chebyshev_eigenpairs(ranks, 30, 1e-7) is not None  # each can alone
    with_one_that_cannot = torch.stack([grams[0], with_spectrum(SPECTRA["slow decay"][0])])
    assert chebyshev_eigenpairs(with_one_that_cannot, 30, 1e-7) is None
    assert (
        chebyshev_eigenpairs(grams * torch.tensor([1, torch.nan, 1]).view(3, 1, 1), 30, 1e-7)
        is None
    )


def test_what_the_filter_has_found_is_put_aside(monkeypatch):
    """A matrix that is solved early stays so, and does not hold up the others."""
    fast, slow = (with_spectrum(torch.arange(1, N + 1).double() ** -power) for power in (3, 0.5))
    rounds = []

    def noted(block):
        rounds.append(len(block))
        return orthonormal_columns(block)

    monkeypatch.setattr("forgetless.tangent.spectrum.orthonormal_columns", noted)
    chebyshev_eigenpairs(fast.unsqueeze(0), 30, 1e-7)
    first = len(rounds)
    chebyshev_eigenpairs(slow.unsqueeze(0), 30, 1e-7)
    second = len(rounds) - first
    together = chebyshev_eigenpairs(torch.stack([fast, slow]), 30, 1e-7)
    # One more, for the first polynomial is of the degree that the faster one can take.
    assert first < second <= len(rounds) - first - second <= second + 1
    for gram, values, vectors in zip((fast, slow), *together, strict=True):
        residuals = (gram @ vectors - vectors * values).norm(dim=0)
        assert (residuals <= 1.01e-7 * (values[0] * values).sqrt()).all()
