"""Directions of layers' inputs: budgets, limits, parameters that stand still, restoring."""

from collections import defaultdict

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from forgetless import ConfigError
from forgetless.linalg import Layout, ParameterSlice
from forgetless.subspace import STORAGES, InputSubspace, Storage
from forgetless.tangent import InputMoments

LAYOUT = Layout({"a.weight": (4, 5), "a.bias": (4,), "b.weight": (3, 2, 2, 1), "norm": (6,)})
THETA = torch.zeros(2, LAYOUT.size, dtype=torch.float64)
MOST = defaultdict(lambda: 0.9)  # weight → share of the energy
seeds = st.integers(0, 2**32 - 1)


def random(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def moments(seed):
    """Of two seeds, whose inputs have other spectra."""
    found = {}
    for name, d in {"a.weight": 6, "b.weight": 4}.items():
        strengths = torch.rand(2, 1, d, generator=torch.Generator().manual_seed(seed)) ** 3
        rows = random(2, 9, d, seed=seed + d) * strengths.double()
        if name == "a.weight":
            rows[:, :, -1] = 1
        found[name] = rows.mT @ rows / 9
    return InputMoments(found, {"a.weight": "a.bias"}, frozenset({"norm"}))


def ones(old, new, before):
    return torch.ones(len(old) + len(new), dtype=torch.float64)


def halves(old, new, before):
    return 0.5 * ones(old, new, before)


def subspace(seed=0, share=0.9, scales=ones, storage=None, tasks=2):
    state = InputSubspace.empty(LAYOUT, THETA, storage or Storage())
    for task in range(tasks):
        state = state.spanning(moments(seed + 10 * task), THETA, defaultdict(lambda: share), scales)
    return state


@given(seeds)
def test_two_seeds_are_those_of_each_alone(seed):
    both, g = subspace(seed), random(2, LAYOUT.size, seed=seed)
    for s in range(2):
        alone = InputSubspace.empty(LAYOUT, THETA[:1], Storage())
        for task in range(2):
            every = moments(seed + 10 * task)
            mine = {name: moment[s : s + 1] for name, moment in every.inputs.items()}
            one = InputMoments(mine, every.biases, every.others)
            alone = alone.spanning(one, THETA[:1], MOST, ones)
        torch.testing.assert_close(both.project_out(g)[s : s + 1], alone.project_out(g[s : s + 1]))
        assert both.record.ranks[s].tolist() == alone.record.ranks[0].tolist()
        torch.testing.assert_close(both.record.shares[s], alone.record.shares[0])


@given(seeds)
def test_the_directions_are_orthonormal_and_hold_the_share(seed):
    state = subspace(seed, share=0.8)
    for name, axis in state.axes.items():
        for s in range(2):
            q = axis.vectors[s][:, state.scales[name][s] > 0]
            torch.testing.assert_close(q.mT @ q, torch.eye(q.shape[1]).double(), atol=1e-9, rtol=0)
            a = moments(seed + 10).inputs[name][s]
            assert (q.mT @ a @ q).trace() >= 0.8 * a.trace() * (1 - 1e-12)
    assert (state.record.shares >= 0.8 - 1e-12).all()
    means = [(moments(seed).inputs[n] + moments(seed + 10).inputs[n]) / 2 for n in state.axes]
    for axis, mean in zip(state.axes.values(), means, strict=True):
        torch.testing.assert_close(axis.trace, mean.diagonal(dim1=1, dim2=2).sum(1))


@given(seeds)
def test_at_most_so_many_directions_and_the_strongest_of_them(seed):
    state = subspace(seed, share=0.95)
    kept = [state.limited(count).kept_share() for count in range(1, state.rank + 1)]
    assert [state.limited(count).rank for count in range(1, state.rank + 1)] == [
        *range(1, state.rank + 1)
    ]
    assert kept == sorted(kept)
    assert kept[-1] == pytest.approx(state.kept_share())
    assert state.limited(99) is state
    limited = subspace(seed, share=0.95, storage=Storage(max_rank=3))
    assert limited.rank == 3


@pytest.mark.parametrize("null_space", [False, True])
def test_never_above_a_budget(null_space):
    state = subspace(share=0.95)
    if null_space:
        state = InputSubspace.empty(LAYOUT, THETA, Storage()).above(moments(0), THETA, 5.0)
    assert state.within(state.nbytes) == (state, None)
    lost = []
    for share in (0.9, 0.7, 0.5):
        budget = int(share * state.nbytes)
        fewer, how = state.within(budget)
        assert fewer.nbytes <= budget
        assert how is not None
        lost.append(fewer.kept_share())
        fewer = fewer.spanning(moments(50), THETA, MOST, ones)  # another task can follow
        assert (fewer.record.shares[:, -1] >= 0.9 - 1e-12).all()
    assert lost == sorted(lost, reverse=True)
    assert ("only the protected directions" in state.within(int(0.9 * state.nbytes))[1]) == (
        null_space
    )
    with pytest.raises(ConfigError, match="budget must be enough for at least one direction"):
        state.within(10)


@given(seeds, st.sampled_from(["a.weight", "a.bias", "b.weight"]))
def test_where_one_parameter_alone_moves(seed, name):
    """It is the nearest step that moves this one alone and has no part along a direction."""
    state = subspace(seed).freezing({"norm"})
    own = LAYOUT.columns[name]
    g = torch.zeros_like(THETA)
    g[:, own] = random(2, own.stop - own.start, seed=seed)
    found = state.restricted([own]).project_out(g)
    for s in range(2):
        rows = torch.eye(LAYOUT.size, dtype=torch.float64)
        removed = torch.stack([row - state.project_out(row.expand(2, -1))[s] for row in rows])
        values, vectors = torch.linalg.eigh(removed)
        span = vectors[own, :][:, values > 0.5]  # of the directions, the part that moves
        basis, sizes, _ = torch.linalg.svd(span, full_matrices=False)
        moving = sizes > 1e-6
        # Gram matrices square the parts: rounding grows by the inverse square of the least.
        assume(bool((sizes[moving] > 1e-3).all()))
        basis = basis[:, moving]
        expected = g[s, own] - basis @ (basis.mT @ g[s, own])
        torch.testing.assert_close(found[s, own], expected, atol=1e-8, rtol=0)
    outside = found.clone()
    outside[:, own] = 0
    assert not outside.any()


def test_a_part_of_scaled_directions_keeps_their_scale():
    g = torch.zeros_like(THETA)
    own = LAYOUT.columns["a.weight"]
    g[:, own] = random(2, 20, seed=1)
    whole = subspace(scales=ones).restricted([own]).project_out(g)
    half = subspace(scales=halves).restricted([own]).project_out(g)
    torch.testing.assert_close(half, (g + whole) / 2)


def test_frozen_parameters_do_not_move_and_all_that_may_move_is_as_before():
    state = subspace().freezing({"norm"})
    g = random(2, LAYOUT.size, seed=0)
    assert not LAYOUT.split(state.project_out(g))["norm"].any()
    every = [*LAYOUT.columns.values()]
    assert torch.equal(state.restricted(every).project_out(g), state.project_out(g))
    assert torch.equal(LAYOUT.split(subspace().project_out(g))["norm"], LAYOUT.split(g)["norm"])


def test_it_comes_back_from_its_tensors():
    state = subspace().freezing({"norm"})
    saved = [state.tensors(seed) for seed in range(2)]
    again = InputSubspace.restore(saved, THETA, Storage())
    g = random(2, LAYOUT.size, seed=0)
    assert torch.equal(again.project_out(g), state.project_out(g))
    assert (again.tasks, again.frozen, again.rank) == (state.tasks, state.frozen, state.rank)
    nxt = [one.spanning(moments(70), THETA, MOST, ones) for one in (state, again)]
    assert torch.equal(nxt[0].project_out(g), nxt[1].project_out(g))
    with pytest.raises(ConfigError, match="are of 42 weights, not 5"):
        InputSubspace.restore(saved, THETA[:, :5], Storage())


@pytest.mark.parametrize("name", ["bfloat16", "cpu", "factored"])
def test_it_has_no_rows_to_store_in_another_way(name):
    with pytest.raises(ConfigError, match="storage must be 'dense' for directions of layers' inp"):
        InputSubspace.empty(LAYOUT, THETA, STORAGES[name])


def test_a_bias_that_comes_and_goes_is_refused():
    other = InputMoments({"a.weight": moments(1).inputs["a.weight"]}, {}, frozenset())
    with pytest.raises(ConfigError, match=r"the bias of a\.weight in another way"):
        subspace().spanning(other, THETA, MOST, ones)


def test_a_layer_without_any_input_adds_nothing():
    nothing = InputMoments({"b.weight": torch.zeros(2, 4, 4).double()}, {}, frozenset())
    empty = InputSubspace.empty(LAYOUT, THETA, Storage())
    state = empty.spanning(nothing, THETA, MOST, ones)
    assert (state.rank, state.kept_share(), state.record.tasks) == (0, 0.0, 1)
    assert state.spanning(moments(0), THETA, MOST, ones).rank > 0
    assert empty.above(nothing, THETA, 10.0).rank == 0


def test_a_weight_that_is_cut_along_its_inputs_is_refused():
    slices = {"a.weight": ParameterSlice((4, 10), 1, 0, 5)}
    state = InputSubspace.empty(Layout(LAYOUT.shapes, slices), THETA, Storage())
    state = state.spanning(moments(0), THETA, MOST, ones)
    with pytest.raises(ConfigError, match="is cut along dimension 1"):
        state.project_out(random(2, LAYOUT.size, seed=0))
