"""Every storage of directions against an explicit dense projection in float64."""

import sys
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import forgetless
from forgetless import OGD, PCAOGD, ConfigError, Guard, KronOGD
from forgetless.linalg import Growth, Layout
from forgetless.methods.ogd import empty_subspace
from forgetless.subspace import (
    DENSE,
    FACTORED,
    DenseSubspace,
    Directions,
    Record,
    Storage,
)
from forgetless.support.validation import DataError
from forgetless.tangent import Batch, features_of, tangent_features
from forgetless.training.models import MLP, LeNet

from ..tangent import networks as net
from ..tangent.reference import built, by_loop, integers, random
from .axes import Axes

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
    again = state.restore([state.tensors(0), state.tensors(1)], random(2, p), storage)
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


def restricted(rows: torch.Tensor, columns: list[slice]) -> DenseSubspace:
    k = len(rows)
    moments = torch.zeros(1, k, k, dtype=torch.float64)
    return DenseSubspace(rows.unsqueeze(0), moments, Record.empty(1)).restricted(columns)


def nearest(g: torch.Tensor, rows: torch.Tensor, movable: torch.Tensor) -> torch.Tensor:
    _, values, vectors = torch.linalg.svd(rows.double() * movable, full_matrices=False)
    basis = vectors[values > 1e-10]
    inside = g.double() * movable
    return inside - (inside @ basis.T) @ basis


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 11), st.integers(0, 11))
def test_the_nearest_movable_vector(seed, k, first, second):
    rows = torch.linalg.qr(random(12, k, seed=seed))[0].T
    columns = [slice(0, first), slice(max(first, second), 12)]
    movable = torch.zeros(12)
    for some in columns:
        movable[some] = 1
    g = random(1, 12, seed=seed + 1)
    found = restricted(rows, columns).project_out(g)
    torch.testing.assert_close(found, nearest(g, rows, movable), rtol=0, atol=1e-6)
    assert float((rows @ found[0]).norm()) < 1e-9


@pytest.mark.parametrize("tiny", [0.1, 0.03, 0.01])
def test_directions_of_which_little_can_move_in_float32(tiny):
    """Half of the directions have nearly the same in what can move as the other half."""
    vectors = random(30, 400)
    vectors[15:, 200:] = vectors[:15, 200:] + tiny * random(15, 200, seed=1)
    vectors[:15, 200:] *= tiny
    rows = torch.linalg.qr(vectors.T)[0].T.float()
    found = restricted(rows, [slice(200, 400)]).project_out(random(1, 400, seed=2).float())
    assert float((rows.double() @ found[0].double()).norm() / found.norm()) < 3e-7


@pytest.mark.parametrize("storage", [DENSE, FACTORED], ids=["dense", "factored"])
def test_both_storages_restrict_alike(storage):
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1)).double()
    phi = tangent_features(model, random(6, 5))
    columns = [its for name, its in phi.columns() if name.startswith("0.")]
    movable = torch.zeros(phi.shape[1])
    for some in columns:
        movable[some] = 1
    state = empty_subspace(torch.zeros(1, phi.shape[1]).double(), storage).add_samples([phi])
    g = random(1, phi.shape[1], seed=2)
    found = state.restricted(columns).project_out(g)
    expected = nearest(g, phi.dense(), movable)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def tasks(count: int = 3, n: int = 6):
    model = built(lambda: MLP(6, 5, 4))
    for t in range(count):
        x, y = random(n, 6, seed=t) * (1 + 9 * t), integers(4, n, seed=t)
        yield tangent_features(model, x, y), by_loop(model, x, y)


def normalised(features) -> torch.Tensor:
    """Every task's features with a total variance of one."""
    return torch.cat([rows / rows.norm() for rows in features])


def test_of_dense_rows_the_best_mixtures_stay():
    p = next(tasks())[1].shape[1]
    state = empty_subspace(random(1, p), Storage())
    features = []
    for phi, rows in tasks():
        state = state.add_samples([phi])
        features.append(rows)
    cut = state.stored(Storage(max_rank=7))
    _, values, vectors = torch.linalg.svd(normalised(features), full_matrices=False)
    overlap = cut.rows[0] @ vectors[:7].T
    torch.testing.assert_close(overlap @ overlap.T, torch.eye(7).double(), rtol=0, atol=1e-8)
    explained = float(values[:7].square().sum()) / 3
    assert cut.kept_share() == pytest.approx(explained, rel=1e-9)
    assert cut.rank == 7
    torch.testing.assert_close(cut.moments[0].diagonal(), values[:7].square())


@pytest.mark.parametrize("kind", ["dense", "factored"])
@pytest.mark.parametrize("principal", [False, True])
def test_the_rank_is_bounded_task_after_task(kind, principal):
    """What is said to be explained is what the kept directions explain, tasks counting alike."""
    p = next(tasks())[1].shape[1]
    state = empty_subspace(random(1, p), Storage(kind, max_rank=7))
    features = []
    for number, (phi, rows) in enumerate(tasks(4), 1):
        state = (
            state.add_principal([phi], 5, centred=False) if principal else state.add_samples([phi])
        )
        if principal:
            _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
            features.append((values[:5, None] * vectors[:5], rows.norm()))
        else:
            features.append((rows, rows.norm()))
        assert state.rank <= 7
        g = random(1, p, seed=number)
        removed = g - state.project_out(g)
        torch.testing.assert_close(
            state.project_out(removed), torch.zeros_like(g), rtol=0, atol=1e-8
        )
        explained = []
        for f, length in features:
            rest = torch.cat([state.project_out(row.unsqueeze(0)) for row in f])
            explained.append(float((f.square().sum() - rest.square().sum()) / length**2))
        # Of what was cut away earlier, later directions may explain a little again.
        assert state.kept_share() <= sum(explained) / number + 1e-9
        if number <= 2:
            assert state.kept_share() == pytest.approx(sum(explained) / number, rel=1e-7)
    assert state.rank == 7
    assert len(state.record.ranks[0]) == 4


def test_factored_principal_directions_are_cut_as_dense_ones_are():
    p = next(tasks())[1].shape[1]
    states = [
        empty_subspace(random(1, p), Storage(kind, max_rank=7)) for kind in ("dense", "factored")
    ]
    for phi, _ in tasks(4):
        states = [state.add_principal([phi], 5, centred=False) for state in states]
    g = random(1, p, seed=1)
    torch.testing.assert_close(
        states[0].project_out(g), states[1].project_out(g), rtol=1e-6, atol=1e-7
    )
    assert states[0].kept_share() == pytest.approx(states[1].kept_share(), rel=1e-7)


def biases_and_head(seed: int) -> tuple[nn.Module, list[str]]:
    """A network whose protected parameters are few, so that samples soon fill their space."""
    torch.manual_seed(seed)
    layers = [nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 3)]
    model = nn.Sequential(*layers)
    names = [n for n, _ in model.named_parameters() if "bias" in n or n.startswith("4")]
    return model, names


@pytest.mark.filterwarnings("ignore:the protected directions leave no room")
@pytest.mark.parametrize("storage", ["dense", "factored", "bfloat16"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_step_becomes_longer_as_directions_fill_the_space(storage, seed):
    model, names = biases_and_head(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    guard = forgetless.Guard(model, optimizer, OGD(20), storage=storage, params=names)
    mine = [p for n, p in model.named_parameters() if n in names]
    for _ in range(6):
        x, y = torch.randn(20, 5), torch.randint(0, 3, (20,))
        for _ in range(3):
            before = parameters_to_vector(mine).detach()
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            plain = 0.05 * torch.cat([p.grad.flatten() for p in mine])
            optimizer.step()
            step = before - parameters_to_vector(mine).detach()
            assert step.norm() <= 1.01 * plain.norm()
        guard.end_task((x, y))
    assert guard.memory_report().directions <= len(before)


def test_directions_of_ones_own_fit_a_budget_and_are_restored():
    record = Record.empty(2).with_task([6, 6], [0.5, 0.7])
    axes = Axes(torch.stack([torch.arange(6), torch.arange(3, 9)]), record)
    assert axes.nbytes == 2 * (6 + 1 + 1) * 8
    assert axes.kept_share() == pytest.approx(0.6)
    assert axes.within(1000) == (axes, None)
    fewer, note = axes.within(100)
    assert (fewer.rank, fewer.nbytes) == (4, 96)
    assert note.startswith("4 of 6 directions kept: 128 B asked for, 100 B given")
    with pytest.raises(ConfigError, match="at least one direction, 48 B for this model, not 40 B"):
        axes.within(40)
    again = axes.moved_to(DENSE, torch.zeros(2, 9))
    assert torch.equal(again.indices, axes.indices)
    assert str(axes) == "Axes"
    with pytest.raises(ConfigError, match="Axes has no `restricted`"):
        Directions.restricted(axes, [slice(0, 3)])


class Mixed(nn.Module):
    """A layer of every kind of gradient: one-hot, rows, patches with and without groups, outer."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.norm = nn.LayerNorm(4)
        self.grouped = nn.Conv1d(4, 6, 2, groups=2)
        self.mix = nn.Conv1d(6, 2, 2)
        self.head = nn.Linear(6, 3)
        self.idle = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        x = torch.tanh(self.grouped(self.norm(self.tokens(x)).mT))
        return self.scale * self.head(torch.tanh(self.mix(x)).flatten(1))


MORE = {"tokens.weight": 2, "grouped.weight": 2, "mix.weight": 1, "mix.bias": 1,
        "head.weight": 3, "head.bias": 3, "idle.weight": 4, "norm.bias": 1}  # fmt: skip
KINDS = {
    "rows": (OGD(30), {}),
    "rows in bfloat16": (PCAOGD(9), {"storage": "bfloat16"}),
    "factors": (OGD(30), {"storage": "factored"}),
    "factored combinations": (PCAOGD(9), {"storage": "factored"}),
    "eigenbasis": (KronOGD(samples=30), {}),
    "a share of it": (KronOGD(energy=0.7, samples=30), {}),
    "a cut one": (KronOGD(energy=0.9, samples=30), {"budget": 1600}),
}


@pytest.mark.usefixtures("_lighter_or_all_factors")
@pytest.mark.filterwarnings("ignore:task 1")  # what the budget costs
@pytest.mark.parametrize("kind", KINDS)
def test_directions_of_a_network_that_has_grown(kind):
    """P' [g, n] = [P g, n] for vectors g of the old weights and n of the new ones."""
    method, options = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Mixed().double()
        x, y = torch.randint(9, (30, 5)), torch.randint(3, (30,))
        guard = Guard(model, torch.optim.SGD(model.parameters()), method, **options)
        guard.end_task((x, y))
        old = guard._steps.state
        layout = guard._parameters.layout
        shapes = {n: (s[0] + MORE.get(n, 0), *s[1:]) if s else s for n, s in layout.shapes.items()}
        growth = Growth(layout, Layout({"first": (2, 2), **shapes, "last": ()}))
        theta = torch.randn(1, growth.new.size, dtype=torch.float64)
        g = torch.randn(1, layout.size, dtype=torch.float64)
        noise = growth.spread(torch.zeros_like(g), theta)
    new = old.grown(growth, theta)
    expected = growth.padded(old.project_out(g)) + noise
    assert not torch.allclose(old.project_out(g), g)
    torch.testing.assert_close(new.project_out(growth.padded(g) + noise), expected)
    again = new.restore([new.tensors(0)], theta, new.storage)
    torch.testing.assert_close(again.project_out(growth.padded(g) + noise), expected)
    assert (new.rank, new.record) == (old.rank, old.record)
    assert new.kept_share() == pytest.approx(old.kept_share(), rel=1e-9)


def test_directions_that_cannot_grow_say_so():
    growth = Growth(Layout({"w": (2,)}), Layout({"w": (3,)}))
    with pytest.raises(ConfigError, match=r"Axes has no `grown`.* more rows"):
        Axes(torch.zeros(1, 1, dtype=torch.long), Record.empty(1)).grown(growth, torch.zeros(1, 3))
