"""The laws of the linear algebra, on random problems and on nasty ones."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.linalg import subspace_angles
from scipy.optimize import minimize

from forgetless import linalg
from forgetless.linalg import (
    inner,
    matmul_long_rows,
    orthonormalize,
    product_with_itself,
    project_cone,
    project_halfspace,
    project_out,
    project_out_span,
)

seeds = st.integers(0, 2**32 - 1)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@given(seeds, st.integers(1, 4), st.integers(0, 7), st.integers(8, 20))
def test_projection_is_idempotent_self_adjoint_and_orthogonal_to_the_basis(seed, s, k, p):
    basis = torch.stack([orthonormalize(v) for v in random(seed, s, k, p)])
    g, h = random(seed + 1, s, p), random(seed + 2, s, p)
    projected = project_out(g, basis)
    torch.testing.assert_close(project_out(projected, basis), projected, atol=1e-12, rtol=0)
    torch.testing.assert_close(inner(projected, h), inner(g, project_out(h, basis)))
    assert (basis @ projected.unsqueeze(-1)).abs().sum() < 1e-11
    assert (inner(projected, projected) <= inner(g, g) + 1e-12).all()


def test_a_row_of_zeros_stands_for_no_direction():
    basis = orthonormalize(random(0, 3, 10))
    padded = torch.cat([basis[:1], torch.zeros(2, 10).double(), basis[1:]])
    g = random(1, 10)
    torch.testing.assert_close(project_out(g, padded), project_out(g, basis))


@given(seeds, st.integers(1, 6), st.integers(1, 12), st.integers(0, 4))
@example(22103, 4, 8, 0)  # what rounding leaves of the fifth row is 400 ulps
def test_orthonormalize_spans_the_same_space(seed, rank, d, old):
    p = 16
    against = orthonormalize(random(seed, old, p)) if old else None
    vectors = random(seed + 1, d, rank) @ random(seed + 2, rank, p)
    rows = orthonormalize(vectors, against)
    stacked = vectors if against is None else torch.cat([against, vectors])
    whole = rows if against is None else torch.cat([against, rows])
    assert len(whole) == np.linalg.matrix_rank(stacked.numpy(), tol=1e-9)
    torch.testing.assert_close(whole @ whole.T, torch.eye(len(whole)).double(), atol=1e-12, rtol=0)
    assert subspace_angles(stacked.T.numpy()[:, :], whole.T.numpy()).max() < 1e-6


def test_more_vectors_than_dimensions_give_the_whole_space():
    vectors = torch.cat([random(0, 1, 4).expand(6, 4), random(1, 9, 4)])
    rows = orthonormalize(vectors)
    torch.testing.assert_close(rows.T @ rows, torch.eye(4).double())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_length_does_not_decide_what_is_independent(scale):
    vectors = random(0, 3, 8, dtype=torch.float32)
    vectors[1] *= scale
    assert len(orthonormalize(vectors)) == 3


def test_zero_and_duplicated_vectors_are_dropped():
    vectors = random(0, 4, 50, dtype=torch.float32)
    rows = orthonormalize(torch.cat([vectors, torch.zeros(1, 50), vectors[:2], vectors[2:3] * -3]))
    assert len(rows) == 4
    assert len(orthonormalize(vectors, against=rows)) == 0


def test_orthonormal_after_two_thousand_directions_in_float32():
    """20 tasks of 100 correlated directions each, a tenth of them duplicates."""
    p = 5000
    shared = random(0, 30, p, dtype=torch.float32)
    basis = torch.empty(0, p)
    for task in range(22):
        mix = random(task + 1, 100, 30, dtype=torch.float32)
        vectors = 10 * mix @ shared + random(task + 100, 100, p, dtype=torch.float32)
        vectors[-10:] = vectors[:10]
        basis = torch.cat([basis, orthonormalize(vectors, against=basis)])
    assert len(basis) == 22 * 90
    assert (basis.double() @ basis.double().T - torch.eye(len(basis))).abs().max() < 1e-5


@given(seeds, st.integers(1, 5), st.integers(1, 6))
def test_projection_on_the_span_of_any_vectors_is_least_squares(seed, s, k):
    vectors = random(seed, s, k, 9)
    vectors[:, -1] = 1e-6 * vectors[:, 0]  # dependent and short
    g = random(seed + 1, s, 9)
    result = project_out_span(g, vectors)
    for row, v, r in zip(g, vectors, result, strict=True):
        fit, *_ = np.linalg.lstsq(v.T.numpy(), row.numpy(), rcond=1e-9)
        np.testing.assert_allclose(r.numpy(), row.numpy() - v.T.numpy() @ fit, atol=1e-9)


@given(seeds, st.integers(1, 5), st.integers(1, 12))
def test_chunks_change_nothing_but_the_order_of_sums(seed, k, width):
    vectors, g = random(seed, 2, k, 9), random(seed + 1, 2, 9)
    whole = project_out_span(g, vectors), project_cone(g, vectors, 0.1)
    with mock.patch.object(linalg, "_chunk", return_value=width):
        assert linalg._chunks(vectors).shape == (2, -(-9 // min(width, 9)), k, min(width, 9))
        parts = project_out_span(g, vectors), project_cone(g, vectors, 0.1)
        product = matmul_long_rows(vectors[0], g)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(product, vectors[0] @ g.T)


@given(seeds)
def test_halfspace_never_opposes_the_reference_and_moves_least(seed):
    g, reference = random(seed, 3, 7), random(seed + 1, 3, 7)
    result = project_halfspace(g, reference)
    assert (inner(result, reference) >= -1e-12).all()
    kept = inner(g, reference) >= 0
    torch.testing.assert_close(result[kept], g[kept])
    touching = inner(result, reference)[~kept]
    torch.testing.assert_close(touching, torch.zeros_like(touching), atol=1e-12, rtol=0)


def test_halfspace_of_a_zero_reference_is_everything():
    g = random(0, 2, 5)
    torch.testing.assert_close(project_halfspace(g, torch.zeros_like(g)), g)


@given(seeds, st.integers(1, 4))
def test_cone_projection_is_the_quadratic_programmes_solution(seed, k):
    """Against SLSQP on the primal problem: min ‖z − g‖² with R z ≥ 0."""
    g, references = random(seed, 6).numpy(), random(seed + 1, k, 6).numpy()
    result = project_cone(torch.from_numpy(g), torch.from_numpy(references)).numpy()
    assert (references @ result >= -1e-9).all()
    primal = minimize(
        lambda z: ((z - g) ** 2).sum(),
        np.zeros(6),
        jac=lambda z: 2 * (z - g),
        constraints={"type": "ineq", "fun": lambda z: references @ z, "jac": lambda z: references},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    np.testing.assert_allclose(result, primal.x, atol=1e-5)


@given(seeds)
def test_cone_of_one_reference_is_a_halfspace(seed):
    g, reference = random(seed, 3, 7), random(seed + 1, 3, 7)
    result = project_cone(g, reference.unsqueeze(1))
    torch.testing.assert_close(result, project_halfspace(g, reference))


@pytest.mark.parametrize("scale", [1e-9, 1e-25])
def test_short_references_count_as_much_as_long_ones(scale):
    g = torch.tensor([-1.0, 1.0, 0.0])
    references = torch.tensor([[scale, 0, 0], [0, 1, 0]])
    expected = torch.tensor([0.0, 1.0, 0.0])
    torch.testing.assert_close(project_cone(g, references), expected)
    torch.testing.assert_close(project_halfspace(g, references[0]), expected)
    torch.testing.assert_close(project_out_span(g, references[:1]), expected)


@pytest.mark.parametrize("scale", [1e-170, 1e155])
def test_lengths_whose_squares_are_out_of_range_do_no_harm(scale):
    g, references = random(0, 5), random(1, 2, 5)
    scales = torch.tensor([[scale], [1.0]], dtype=torch.float64)
    for project in (project_cone, project_out_span):
        torch.testing.assert_close(project(g, references * scales), project(g, references))


def test_cone_with_equal_and_zero_references():
    g, reference = -random(0, 5), random(0, 5)
    references = torch.stack([reference, reference, torch.zeros(5).double()])
    torch.testing.assert_close(project_cone(g, references), project_halfspace(g, reference))


@given(seeds, st.floats(0.1, 2))
def test_a_margin_bounds_the_duals_from_below(seed, margin):
    g, references = random(seed, 8), random(seed + 1, 2, 8)
    duals = torch.linalg.lstsq(references.T, (project_cone(g, references, margin) - g)).solution
    if (references @ g >= 0).all():
        torch.testing.assert_close(duals, torch.zeros(2).double(), atol=1e-9, rtol=0)
    else:
        assert (duals >= margin - 1e-9).all()


@pytest.mark.parametrize("columns", [1, 255, 256, 1100])
def test_a_product_with_itself_by_blocks(columns):
    rows = torch.randn(40, columns, dtype=torch.float64)
    found = product_with_itself(rows)
    torch.testing.assert_close(found, rows.T @ rows, atol=1e-12, rtol=0)
