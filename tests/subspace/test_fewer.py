"""When there is room for fewer directions: which ones stay, and what they explain."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgetless import ConfigError, Storage
from forgetless.subspace import empty_subspace
from forgetless.subspace.selection import best_rows
from forgetless.tangent import tangent_features
from forgetless.training.models import MLP

from ..tangent.reference import built, by_loop, integers, random


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


@given(st.integers(0, 10**6))
def test_samples_are_chosen_greedily_by_what_they_add(seed):
    vectors, root = random(7, 5, seed=seed), random(5, 5, seed=seed + 1)
    moments = root @ root.T

    def explained(chosen) -> float:
        basis = torch.linalg.qr(vectors[list(chosen)].T)[0]
        return float((basis.T @ moments @ basis).trace())

    chosen: list[int] = []
    for _ in range(3):
        gains = {i: explained([*chosen, i]) for i in range(7) if i not in chosen}
        chosen.append(max(gains, key=gains.__getitem__))
        assert best_rows(vectors, moments, len(chosen)).tolist() == sorted(chosen)
    best = max(explained(c) for c in itertools.combinations(range(7), 3))
    assert explained(chosen) >= 0.6 * best


def test_more_samples_than_dimensions_are_asked_for():
    vectors = random(6, 3)
    assert len(best_rows(vectors, torch.eye(3).double(), 5)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_rank": 0}, "max_rank must be a whole number of at least 1, or None, not 0"),
        ({"max_rank": 2.5}, "max_rank must be a whole number"),
        ({"max_rank": "ten"}, "max_rank must be a whole number .*, not 'ten'"),
        ({"max_rank": True}, "max_rank must be a whole number"),
        ({"kind": "sparse"}, "storage must be 'dense' or 'factored', not 'sparse'"),
        ({"dtype": torch.int8}, "dtype must be a floating-point type, not torch.int8"),
        ({"dtype": "bfloat16"}, "dtype must be a floating-point type, not 'bfloat16'"),
        ({"device": "cpu"}, "device must be a torch.device or None, not 'cpu'"),
        ({"kind": "factored", "dtype": torch.bfloat16}, "storage must be factored as it is"),
    ],
)
def test_storages_that_cannot_be(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Storage(**arguments)


def test_storages_in_words():
    assert str(Storage()) == "dense rows"
    assert str(Storage("factored")) == "factored samples"
    there = Storage(dtype=torch.bfloat16, device=torch.device("cpu"))
    assert str(there) == "dense rows in bfloat16 on cpu"
