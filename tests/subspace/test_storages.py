"""Every way of keeping directions against an explicit dense projection in float64."""

import sys
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from forgetless.subspace import DENSE, FACTORED, Storage, empty_subspace, restored_subspace
from forgetless.subspace.kernels import sweep
from forgetless.subspace.kernels.sweep import project_out_rows
from forgetless.support.errors import DataError
from forgetless.tangent import Batch, features_of, tangent_features
from forgetless.training.models import MLP, LeNet

from ..tangent import networks as net
from ..tangent.reference import built, by_loop, integers, random

# Networks, inputs and labels: by rules, by rules that share weights, by rows.
NETWORKS = {
    "mlp": (lambda: MLP(6, 5, 4), lambda n: random(n, 6), 4),
    "convolutions": (
        lambda: LeNet((1, 8, 8), hidden=7, outputs=4),
        lambda n: random(n, 1, 8, 8),
        4,
    ),
    "tied embedding": (net.tied_embedding, lambda n: integers(net.V, n, 4), net.V),
    "transformer": (net.transformer, lambda n: integers(net.V, n, 5), net.V),
    "attention": (lambda: net.multihead(True), lambda n: random(n, 5, net.D), 3),
    "residual": (net.residual, lambda n: random(n, 2, 6, 6), 3),
    "bare parameters": (net.Bare, lambda n: random(n, 4), 3),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


@pytest.fixture(params=[None, 0], ids=["lighter", "factors"])
def _lighter_or_all_factors(request, monkeypatch):
    """Networks as small as these have few gradients that are larger than their factors."""
    if request.param is not None:
        monkeypatch.setattr(sys.modules["forgetless.tangent.storage"], "_AS_ROWS", request.param)


def problem(name: str, n: int = 9):
    make, inputs, classes = NETWORKS[name]
    model = built(make)
    return model, inputs(n), integers(classes, n, seed=3)


def basis_of(rows: torch.Tensor) -> torch.Tensor:
    _, values, vectors = torch.linalg.svd(rows.double(), full_matrices=False)
    return vectors[values > 1e-9 * values[0]] if len(values) else vectors


def without(g: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    return g - (g @ basis.T) @ basis


@pytest.mark.usefixtures("_lighter_or_all_factors")
@pytest.mark.parametrize("storage", [DENSE, FACTORED], ids=["dense", "factored"])
@every_network
def test_samples_of_several_tasks(name, storage):
    """Task after task gives the same as all at once by autograd and an SVD."""
    model, x, y = problem(name)
    rows = by_loop(model, x, y)
    p = rows.shape[1]
    state = empty_subspace(random(1, p), storage)
    assert state.rank == 0
    g = random(2, p, seed=5)[:1]
    torch.testing.assert_close(state.project_out(g), g)
    for start in (0, 4, 6):
        part = slice(start, start + 4)  # some samples twice
        state = state.add_samples([tangent_features(model, x[part], y[part])])
    expected = without(g, basis_of(rows))
    torch.testing.assert_close(state.project_out(g), expected, rtol=1e-9, atol=1e-9)
    assert state.rank == len(basis_of(rows))
    assert state.record.ranks.tolist()[0][0] == len(basis_of(rows[:4]))
    assert state.record.shares.tolist() == [[1.0, 1.0, 1.0]]
    assert state.kept_share() == pytest.approx(1.0)


@pytest.mark.parametrize("centred", [False, True])
@every_network
def test_principal_directions_of_several_tasks(name, centred):
    model, x, y = problem(name, 10)
    rows = by_loop(model, x, y)
    p = rows.shape[1]
    states = {s.kind: empty_subspace(random(1, p), s) for s in (DENSE, FACTORED)}
    tops, shares = [], []
    for start in (0, 5):
        part = slice(start, start + 5)
        phi = tangent_features(model, x[part], y[part])
        states = {
            kind: state.add_principal([phi], 3, centred=centred) for kind, state in states.items()
        }
        matrix = rows[part] - rows[part].mean(0) * centred
        _, values, vectors = torch.linalg.svd(matrix, full_matrices=False)
        values = values[:3][values[:3] > 1e-6 * values[0]]
        tops.append(vectors[: len(values)])
        shares.append(float(values.square().sum() / matrix.square().sum()))
    g = random(1, p, seed=5)
    expected = without(g, basis_of(torch.cat(tops)))
    for state in states.values():
        torch.testing.assert_close(state.project_out(g), expected, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(
            state.record.shares[0], torch.tensor(shares).double(), rtol=1e-7, atol=0
        )
        assert state.kept_share() == pytest.approx(sum(shares) / 2, rel=1e-6)


@pytest.mark.parametrize("storage", [DENSE, FACTORED], ids=["dense", "factored"])
def test_in_float32(storage):
    model = built(lambda: MLP(30, 20, 10)).float()
    x, y = random(40, 30).float(), integers(10, 40)
    rows = by_loop(model.double(), x.double(), y)
    phi = tangent_features(model.float(), x, y)
    state = empty_subspace(torch.zeros(1, rows.shape[1]), storage).add_samples([phi])
    g = random(1, rows.shape[1], seed=2)
    found = state.project_out(g.float())
    assert found.dtype == torch.float32
    error = (found.double() - without(g, basis_of(rows))).norm() / g.norm()
    assert float(error) < 1e-6


@pytest.mark.parametrize("storage", [DENSE, FACTORED], ids=["dense", "factored"])
@pytest.mark.parametrize("components", [None, 5])
def test_several_scalars_a_sample(storage, components):
    """Rows of a sample's K outputs: weights must belong to the rows they were found for."""
    model, x = built(lambda: MLP(6, 5, 4)), random(7, 6)
    rows = by_loop(model, x)
    phi = tangent_features(model, x, chunk=3)
    state = empty_subspace(random(1, rows.shape[1]), storage)
    if components is None:
        state, basis = state.add_samples([phi]), basis_of(rows)
    else:
        state = state.add_principal([phi], components, centred=False)
        basis = torch.linalg.svd(rows, full_matrices=False)[2][:components]
    g = random(1, rows.shape[1], seed=5)
    torch.testing.assert_close(state.project_out(g), without(g, basis), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("storage", [DENSE, FACTORED], ids=["dense", "factored"])
def test_sequences_of_different_lengths(storage):
    model = built(net.transformer)
    parts = [integers(net.V, 4, length, seed=length) for length in (5, 3, 5, 2)]
    labels = [integers(net.V, 4, seed=k) for k in range(4)]
    rows = torch.cat([by_loop(model, x, y) for x, y in zip(parts, labels, strict=True)])
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = [n for n, _ in model.named_parameters()]
    batches = [Batch((x,), {}, (y,)) for x, y in zip(parts, labels, strict=True)]
    true_class = lambda out, y: out.gather(1, y.unsqueeze(1)).squeeze(1)  # noqa: E731
    phi = features_of(model, values, batches, true_class, names=names)
    state = empty_subspace(random(1, rows.shape[1]), storage).add_samples([phi])
    g = random(1, rows.shape[1], seed=5)
    torch.testing.assert_close(
        state.project_out(g), without(g, basis_of(rows)), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("storage", [DENSE, FACTORED], ids=["dense", "factored"])
def test_duplicates_and_dependent_samples_add_nothing(storage):
    model = built(lambda: nn.Linear(5, 1, bias=False)).float()
    x = random(3, 5).float()
    dependent = torch.stack([x[0] + x[1], 2 * x[2], x[0] * 0])
    state = empty_subspace(torch.zeros(1, 5), storage)
    for some in (x, x, dependent, torch.cat([x, dependent, random(1, 5, seed=9).float()])):
        state = state.add_samples([tangent_features(model, some)])
    assert state.record.ranks.tolist() == [[3, 0, 0, 1]]
    assert state.rank == 4
    g = random(1, 5, seed=3).float()
    basis = basis_of(torch.cat([x, random(1, 5, seed=9).float()]))
    torch.testing.assert_close(
        state.project_out(g).double(), without(g.double(), basis), rtol=0, atol=1e-5
    )


@given(st.integers(0, 10**6), st.floats(-7, 0))
def test_nearly_dependent_samples_are_protected_all_the_same(seed, exponent):
    """However close two samples are, neither one's output moves by more than rounding.

    Of a sample that is dropped for the others' sake at most √1e-9 of its length was its own.
    """
    x = random(4, 9, seed=seed).float()
    x[3] = x[0] + 10**exponent * x[3]
    model = nn.Linear(9, 1, bias=False)
    unit = (x / x.norm(dim=1, keepdim=True)).double()
    g = random(1, 9, seed=seed + 1).float()
    for storage in (DENSE, FACTORED):
        state = empty_subspace(torch.zeros(1, 9), storage).add_samples([tangent_features(model, x)])
        out = state.project_out(g).double()
        assert float((unit @ out.T).norm()) <= 5e-5 * float(g.norm())


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
        monkeypatch.setattr(sweep, "_CACHED", size)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
        found = sweep.project_out_rows(g, rows)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
        weights = sweep.coefficients(g, rows)
        torch.testing.assert_close(weights, (rows.float() @ g.unsqueeze(2))[..., 0])
        combined = sweep.combination(weights, rows)
        torch.testing.assert_close(combined, (weights.unsqueeze(1) @ rows.float())[:, 0])


def test_bfloat16_rows_leave_about_a_thousandth():
    model, x, y = problem("mlp")
    phi = tangent_features(model.float(), x.float(), y)
    theta = torch.zeros(1, phi.shape[1])
    basis = basis_of(by_loop(model.double(), x, y))
    state = empty_subspace(theta, Storage(dtype=torch.bfloat16)).add_samples([phi])
    inside = random(1, len(basis)) @ basis
    left = state.project_out(inside.float()).double()
    share = float((left @ basis.T).norm() / inside.norm())
    assert 1e-5 < share < 4e-3
    assert state.rows.dtype == torch.bfloat16
    assert state.nbytes == state.rank * phi.shape[1] * 2 + 8 * state.rank**2


@pytest.mark.parametrize("storage", [DENSE, FACTORED], ids=["dense", "factored"])
@pytest.mark.parametrize("principal", [False, True])
def test_seeds_of_different_ranks(storage, principal):
    """A leading dimension of seeds: the second has duplicates."""
    model, x, y = problem("mlp", 6)
    other = x.clone()
    other[3:] = other[:3]
    same = y.clone()
    same[3:] = same[:3]
    phis = [tangent_features(model, x, y), tangent_features(model, other, same)]
    p = phis[0].shape[1]
    state = empty_subspace(random(2, p), storage)
    add = partial(state.add_principal, components=5, centred=False)
    state = (add if principal else state.add_samples)(phis)
    g = random(2, p, seed=4)
    expected = []
    for one, (a, b) in zip(g, ((x, y), (other, same)), strict=True):
        vectors = torch.linalg.svd(by_loop(model, a, b), full_matrices=False)
        kept = vectors.Vh[: 5 if principal else 6][vectors.S[: 5 if principal else 6] > 1e-9]
        expected.append(without(one, kept))
    torch.testing.assert_close(state.project_out(g), torch.stack(expected), rtol=1e-7, atol=1e-8)
    assert state.record.ranks.tolist() == ([[5], [3]] if principal else [[6], [3]])
    again = restored_subspace([state.tensors(0), state.tensors(1)], random(2, p), storage)
    assert torch.equal(again.project_out(g), state.project_out(g))
    if storage is FACTORED:
        torch.testing.assert_close(
            state.dense().project_out(g), state.project_out(g), rtol=1e-7, atol=1e-8
        )


def test_a_gradient_of_zero_is_no_direction():
    model = net.Calls(lambda m, x: m.layer(x) * 0, layer=nn.Linear(3, 2)).double()
    phi = tangent_features(model, random(4, 3), integers(2, 4))
    for storage in (DENSE, FACTORED):
        state = empty_subspace(random(1, 8), storage).add_samples([phi])
        assert state.rank == 0
        g = random(1, 8)
        torch.testing.assert_close(state.project_out(g), g)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
@pytest.mark.parametrize("principal", [False, True])
@pytest.mark.parametrize("storage", [DENSE, FACTORED], ids=["dense", "factored"])
def test_gradients_whose_squares_float32_cannot_hold(storage, principal, scale):
    model, x = nn.Linear(9, 1, bias=False), random(5, 9).float()
    state = empty_subspace(torch.zeros(1, 9), storage)
    phi = tangent_features(model, scale * x)
    added = state.add_principal([phi], 3, centred=False) if principal else state.add_samples([phi])
    basis = basis_of(x)[: 3 if principal else 5]
    g = random(1, 9, seed=1)
    assert added.rank == len(basis)
    assert 0 < added.kept_share() <= 1 + 1e-6
    torch.testing.assert_close(
        added.project_out(g.float()).double(), without(g, basis), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("principal", [False, True])
@pytest.mark.parametrize("storage", [DENSE, FACTORED], ids=["dense", "factored"])
def test_what_is_not_finite_is_refused(storage, principal):
    """It would leave a task without protection."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.w).abs().sqrt().sum(1)  # finite, and its slope at zero is not

    phi = tangent_features(Root(), torch.ones(4, 3))
    state = empty_subspace(torch.zeros(1, 3), storage)
    with pytest.raises(DataError, match="NaN or infinite"):
        state.add_principal([phi], 2, centred=False) if principal else state.add_samples([phi])
