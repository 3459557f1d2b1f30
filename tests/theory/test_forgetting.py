"""Measured, solved and predicted forgetting are one number for all methods and tasks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forgetless import ConfigError
from forgetless.linalg import orthonormalize
from forgetless.tangent import tangent_features
from forgetless.theory import (
    ComponentProjection,
    Descent,
    GradientProjection,
    LinearTask,
    NoProjection,
    Projection,
    SampleProjection,
    bounds,
    coordinates,
    decompose,
    gram_grid,
    learn,
    overlap,
    remembered,
    rotation,
    squared_drift,
)
from tests.theory.problems import (
    METHODS,
    NETWORKS,
    autograd_features,
    dense_projection,
    generator,
    network_tasks,
    pairs,
    random_tasks,
    seeded,
)


def stored_rows(method: Projection, tasks: list[LinearTask], weights: np.ndarray) -> np.ndarray:
    """What a method must not move along when the task after these starts, not orthonormal."""
    rows = [np.zeros((1, len(weights)))]
    for j, task in enumerate(tasks):
        phi, n = task.features.numpy(), len(task.features)
        if isinstance(method, SampleProjection):
            rows.append(phi[remembered(method.memory, method.seed, j, n).numpy()])
        elif isinstance(method, ComponentProjection):
            phi = phi - phi.mean(0) * method.centred
            rows.append(np.linalg.svd(phi)[2][: method.components])
        elif isinstance(method, GradientProjection):
            kept = remembered(method.memory, method.seed, j, n).numpy()
            residual = (task.outputs.numpy() + phi @ weights - task.targets.numpy())[kept]
            gradient = phi[kept].T @ residual / len(kept)
            rows.append(gradient[None] * (np.abs(residual).max() > 1e-9))
    return np.concatenate(rows)


def reference(tasks: list[LinearTask], method: Projection, weight_decay: float) -> np.ndarray:
    """ω_k − ω_0 for k = 0 … T by dense p × p projections, NumPy's solver and pseudo-inverse."""
    p = tasks[0].features.shape[1]
    path = [np.zeros(p)]
    for k, task in enumerate(tasks):
        stored = stored_rows(method, tasks[:k], path[-1])
        projection = np.eye(p) - np.linalg.pinv(stored, rcond=1e-10) @ stored
        phi = task.features.numpy()
        projected = phi @ projection
        residual = task.targets.numpy() - task.outputs.numpy() - phi @ path[-1]
        if weight_decay:
            kernel = projected @ projected.T + weight_decay * np.eye(len(phi))
            step = projected.T @ np.linalg.solve(kernel, residual)
        else:
            step = np.linalg.pinv(projected, rcond=1e-10) @ residual
        path.append(path[-1] + step)
    return np.array(path)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("kind", NETWORKS)
def test_three_ways_to_the_same_forgetting(kind, method, weight_decay):
    tasks = network_tasks(kind)
    features = [task.features for task in tasks]
    narrow = coordinates([[a @ b.T for b in features] for a in features])
    in_coordinates = [
        LinearTask(z, t.targets, t.outputs) for z, t in zip(narrow, tasks, strict=True)
    ]
    assert narrow[0].shape[1] == 30 < features[0].shape[1]

    expected = reference(tasks, method, weight_decay)
    solved = learn(tasks, method, weight_decay=weight_decay)
    trained = learn(in_coordinates, method, weight_decay=weight_decay, solver=Descent())
    torch.testing.assert_close(solved.weights, torch.from_numpy(expected), rtol=1e-9, atol=1e-10)
    for s, t in pairs(len(tasks)):
        phi = features[s].numpy()
        by_reference = np.square(phi @ (expected[t + 1] - expected[s + 1])).sum()
        measured = trained.predict(narrow[s], tasks[s].outputs)
        assert by_reference > 1e-4
        assert solved.drift(s, t).square().sum() == pytest.approx(by_reference, rel=1e-8)
        assert decompose(solved, s, t).total == pytest.approx(by_reference, rel=1e-8)
        by_training = squared_drift(measured[s + 1], measured[t + 1])
        assert by_training == pytest.approx(by_reference, rel=1e-6)
        # The expression from what training left behind, in coordinates.
        assert decompose(trained, s, t).total == pytest.approx(by_training, rel=1e-6)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_plain_projected_descent_on_the_weights_of_the_network(method):
    # Written out once more: every step projected with a p × p matrix, no acceleration.
    tasks = network_tasks("mlp", sizes=(6, 5, 6))
    solved = learn(tasks, method, weight_decay=2.0)
    weights = torch.zeros(tasks[0].features.shape[1], dtype=torch.float64)
    for k, task in enumerate(tasks):
        start, phi = weights, task.features
        projection = dense_projection(solved.bases[k])
        kernel = phi @ projection @ phi.T + 2.0 * torch.eye(len(phi), dtype=phi.dtype)
        step = 0.9 / torch.linalg.matrix_norm(kernel, 2)
        for _ in range(800):
            leaf = weights.clone().requires_grad_()
            error = task.outputs + phi @ leaf - task.targets
            loss = error.square().sum() / 2 + 2.0 * (leaf - start).square().sum() / 2
            (gradient,) = torch.autograd.grad(loss, leaf)
            weights = weights - step * projection @ gradient
    torch.testing.assert_close(weights, solved.weights[-1], rtol=1e-7, atol=1e-9)


@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(2, 5), min_size=2, max_size=4),
    p=st.integers(1, 9),
    whole=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1, 2.0]),
    name=st.sampled_from(["sgd", "ogd", "pca", "centred", "gem"]),
    memory=st.integers(1, 2),
)
def test_the_expression_is_the_drift(seed, sizes, p, whole, weight_decay, name, memory):
    # More samples than parameters, duplicates, zero features: all that makes kernels singular.
    tasks = random_tasks(seed, sizes, p, whole=whole)
    method = {
        "ogd": SampleProjection(memory, seed),
        "pca": ComponentProjection(memory),
        "centred": ComponentProjection(memory, centred=True),
        "gem": GradientProjection(memory, seed),
    }.get(name, METHODS["sgd"])
    solved = learn(tasks, method, weight_decay=weight_decay)
    for s, t in pairs(len(tasks)):
        parts = decompose(solved, s, t)
        torch.testing.assert_close(parts.drift, solved.drift(s, t), rtol=1e-8, atol=1e-8)
        for sums_to_it in (parts.by_direction, parts.by_task, parts.shares):
            assert float(sums_to_it.sum()) == pytest.approx(parts.total, rel=1e-8, abs=1e-8)


def test_the_parts_are_those_of_the_corollary():
    # U, Σ, O, M and ỹ as the paper writes them, with matrices p × p.
    tasks = network_tasks("mlp")
    solved = learn(tasks, ComponentProjection(components=2), weight_decay=0.3)
    parts = decompose(solved, 0, 2)
    assert [c.task for c in parts.contributions] == [1, 2]
    u, s, v = parts.factors.u, parts.factors.s.diag(), parts.factors.v
    for term in parts.contributions:
        k = term.task
        uk, sk, vk = solved.factors[k].u, solved.factors[k].s.diag(), solved.factors[k].v
        projection = dense_projection(solved.bases[k])
        phi = tasks[k].features @ projection
        kernel = phi @ phi.T + 0.3 * torch.eye(len(phi), dtype=phi.dtype)
        m = sk @ uk.T @ torch.linalg.inv(kernel)
        before = solved.predict(tasks[k].features, tasks[k].outputs)[k]
        torch.testing.assert_close(term.residual, tasks[k].targets - before)
        torch.testing.assert_close(term.overlap, v @ projection @ vk.T)
        torch.testing.assert_close(term.rotation, m)
        torch.testing.assert_close(term.drift, u @ s @ v @ projection @ vk.T @ m @ term.residual)
        torch.testing.assert_close(projection @ vk.T @ m @ term.residual, solved.steps[k])
    assert (parts.factors.u.T @ parts.drift).square().tolist() == pytest.approx(
        parts.by_direction.tolist()
    )


def test_m_of_sgd_is_that_of_the_theorem():
    tasks = network_tasks("mlp")
    solved = learn(tasks, METHODS["sgd"], weight_decay=0.3)
    f = solved.factors[1]
    m = (f.s / (f.s.square() + 0.3)).diag() @ f.u.T
    torch.testing.assert_close(rotation(f, solved.bases[1], weight_decay=0.3), m)
    torch.testing.assert_close(overlap(solved.factors[0], f), solved.factors[0].v @ f.v.T)


def test_m_of_a_task_that_is_partly_protected():
    # φ̃ has a smaller rank than φ: the inverse of the corollary is 1/λ on what was lost.
    first, second = random_tasks(4, (3, 4), 12)
    shared = torch.cat([first.features[:2], second.features[:2]])
    solved = learn(
        [first, LinearTask(shared, second.targets, second.outputs)],
        SampleProjection(),
        weight_decay=0.3,
    )
    f, phi = solved.factors[1], shared @ dense_projection(solved.bases[1])
    kernel = phi @ phi.T + 0.3 * torch.eye(4, dtype=phi.dtype)
    expected = f.s.diag() @ f.u.T @ torch.linalg.inv(kernel)
    m = rotation(f, solved.bases[1], weight_decay=0.3)
    torch.testing.assert_close(m, expected, rtol=1e-9, atol=1e-9)


def test_forgetting_can_be_measured_on_other_samples():
    tasks = network_tasks("mlp")
    held_out = network_tasks("mlp", sizes=(4,), seed=0)[0].features + 0.1
    solved = learn(tasks, SampleProjection(memory=3), weight_decay=0.1)
    parts = decompose(solved, 1, 3, held_out)
    change = solved.weights[4] - solved.weights[2]
    assert parts.total == pytest.approx(float((held_out @ change).square().sum()), rel=1e-10)


def test_a_task_that_undoes_another_counts_negative():
    one = torch.ones(1, 1, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    tasks = [LinearTask(one, zero + y, zero) for y in (0.0, 2.0, 1.0)]
    parts = decompose(learn(tasks, METHODS["sgd"]), 0, 2)
    assert parts.by_task.tolist() == [2.0, -1.0]
    assert parts.total == 1.0


@pytest.mark.parametrize("kind", NETWORKS)
def test_tangent_features_give_what_autograd_gives(kind):
    build, shape = NETWORKS[kind]
    model = seeded(build)
    x = torch.randn(3, 6, *shape, generator=generator(0), dtype=torch.float64)
    y = torch.arange(18).view(3, 6) % 3
    operators = [tangent_features(model, *task) for task in zip(x, y, strict=True)]
    targets = torch.randn(3, 6, generator=generator(1), dtype=torch.float64)
    totals = []
    for features in (
        [autograd_features(model, *task) for task in zip(x, y, strict=True)],
        coordinates(gram_grid(operators)),
    ):
        tasks = [LinearTask(phi, t, 0 * t) for phi, t in zip(features, targets, strict=True)]
        solved = learn(tasks, ComponentProjection(2), weight_decay=0.1)
        totals.append([decompose(solved, s, t).total for s, t in pairs(3)])
    assert totals[0] == pytest.approx(totals[1], rel=1e-8)


def task(rows: list[list[float]], targets: list[float]) -> LinearTask:
    features = torch.tensor(rows, dtype=torch.float64)
    y = torch.tensor(targets, dtype=torch.float64)
    return LinearTask(features, y, torch.zeros_like(y))


@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(2, 4), min_size=2, max_size=4),
    p=st.integers(1, 8),
    whole=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1, 3.0]),
    kept=st.integers(1, 2),
    data=st.data(),
)
def test_valid_bounds_hold(seed, sizes, p, whole, weight_decay, kept, data):
    methods = [
        NoProjection(),
        SampleProjection(kept),
        ComponentProjection(kept),
        ComponentProjection(kept, centred=True),
        GradientProjection(kept),
        SampleProjection(),
    ]
    method = data.draw(st.sampled_from(methods))
    tasks = random_tasks(seed, sizes, p, whole=whole)
    solved = learn(tasks, method, weight_decay=weight_decay)
    for s, t in pairs(len(tasks)):
        measured = float(solved.drift(s, t).square().sum())
        b = bounds(solved, s, t)
        slack = 1e-9 * (1 + b.valid)
        assert measured <= b.tight + slack
        assert b.tight <= b.valid + slack
        if isinstance(method, ComponentProjection) and method.centred:
            continue
        assert b.valid <= (t - s) * b.printed + slack
        if t == s + 1:  # one later task: what is printed is true
            assert b.printed == pytest.approx(b.valid)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_they_hold_for_a_network(method):
    solved = learn(network_tasks("cnn"), method, weight_decay=0.2)
    for s, t in pairs(4):
        b = bounds(solved, s, t)
        assert decompose(solved, s, t).total <= b.tight <= b.valid * (1 + 1e-12)


def test_the_printed_bound_of_sgd_fails_for_two_later_tasks():
    # One parameter, one sample, φ = 1: the targets 0, 1, 2 are learned one after another.
    solved = learn([task([[1]], [y]) for y in (0, 1, 2)], NoProjection())
    assert float(solved.drift(0, 2).square().sum()) == 4
    b = bounds(solved, 0, 2)
    assert (b.printed, b.valid, b.tight) == (2, 4, 4)


def test_the_printed_bound_of_gem_nt_fails_likewise():
    # What it remembers of task 1, the second sample, keeps its loss of zero.
    tasks = [task([[1, 0], [0, 1]], [0, 0]), task([[1, 0]], [1]), task([[1, 0]], [2])]
    solved = learn(tasks, GradientProjection(memory=[torch.tensor([1]), torch.tensor([0])]))
    assert float(solved.drift(0, 2).square().sum()) == pytest.approx(4)
    b = bounds(solved, 0, 2)
    assert (b.printed, b.valid, b.tight) == pytest.approx((2, 4, 4))


def test_the_printed_bound_of_pca_ogd_fails_likewise():
    tasks = [
        task([[2, 0, 0], [0, 1, 0]], [0, 0]),
        task([[0, 1, 0], [0, 0, 2]], [1, 0]),
        task([[0, 1, 0]], [2]),
    ]
    solved = learn(tasks, ComponentProjection(components=1))
    assert float(solved.drift(0, 2).square().sum()) == pytest.approx(4)
    b = bounds(solved, 0, 2)
    assert (b.printed, b.valid, b.tight) == pytest.approx((2, 4, 4))


@pytest.mark.parametrize("later", [1, 2, 5, 10])
def test_it_is_off_by_the_number_of_later_tasks(later):
    solved = learn([task([[1]], [y]) for y in range(later + 1)], NoProjection())
    b = bounds(solved, 0, later)
    assert float(solved.drift(0, later).square().sum()) == pytest.approx(later * b.printed)
    assert b.valid == pytest.approx(later * b.printed)


def test_centred_pca_breaks_the_bound_with_one_later_task():
    # The mean (3, 0) is the largest part of φ and not among the centred directions.
    tasks = [task([[3, 1], [3, -1]], [0, 0]), task([[1, 0]], [1])]
    centred = learn(tasks, ComponentProjection(components=1, centred=True))
    assert float(centred.drift(0, 1).square().sum()) == pytest.approx(18)
    b = bounds(centred, 0, 1)
    assert (b.printed, b.valid, b.tight) == pytest.approx((2, 18, 18))
    uncentred = learn(tasks, ComponentProjection(components=1))
    assert float(uncentred.drift(0, 1).norm()) < 1e-12


def test_pca_ogd_that_keeps_everything_is_bounded_by_zero():
    solved = learn(random_tasks(0, (3, 3), 9), ComponentProjection())
    b = bounds(solved, 0, 1)
    assert b.printed == b.valid == 0
    assert b.tight < 1e-20


class EverySecond:
    """A projection of one's own: every second sample's feature is protected."""

    def extend(self, basis, seen, rtol):
        return torch.cat([basis, orthonormalize(seen[-1].features[::2], against=basis)])


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_projection_of_ones_own(kind):
    tasks = network_tasks(kind)
    own = learn(tasks, EverySecond(), weight_decay=0.3)
    halves = [torch.arange(0, len(t.targets), 2) for t in tasks]
    expected = learn(tasks, SampleProjection(memory=halves), weight_decay=0.3)
    for s, t in pairs(4):
        delta = decompose(own, s, t).total
        assert delta == pytest.approx(float(own.drift(s, t).square().sum()), rel=1e-8, abs=1e-16)
        assert delta == pytest.approx(decompose(expected, s, t).total, rel=1e-7, abs=1e-14)
        bound = bounds(own, s, t)
        assert delta <= bound.tight * (1 + 1e-9)
        assert bound.tight <= bound.valid * (1 + 1e-9)


def given_projections(p: int, tasks: int, seed: int) -> list[Tensor]:
    """Matrices T that have nothing to do with each other or with the features, but I at first."""
    g = generator(seed)
    found = [torch.eye(p, dtype=torch.float64)]
    for _ in range(tasks - 1):
        q = torch.linalg.qr(torch.randn(p, p // 2, generator=g, dtype=torch.float64))[0]
        found.append(torch.eye(p, dtype=torch.float64) - q @ q.T)
    return found


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("kind", NETWORKS)
def test_any_orthogonal_projections_forget_what_is_predicted(kind, weight_decay):
    """δ against ridge regression on φ T with p × p matrices, by `lstsq`."""
    tasks = network_tasks(kind)
    p = tasks[0].features.shape[1]
    matrices = given_projections(p, len(tasks), 3)
    method = [lambda rows, t=t: rows @ t for t in matrices]
    learned = learn(tasks, method, weight_decay=weight_decay)
    weights, after = np.zeros(p), []
    for task, t in zip(tasks, matrices, strict=True):
        phi, t = task.features.numpy(), t.numpy()
        residual = task.targets.numpy() - task.outputs.numpy() - phi @ weights
        stacked = np.concatenate([phi @ t, np.sqrt(weight_decay) * np.eye(p)])
        weights = weights + t @ np.linalg.lstsq(stacked, np.pad(residual, (0, p)), rcond=1e-9)[0]
        after.append(weights)
    trained = learn(tasks, method, weight_decay=0.3, solver=Descent()) if weight_decay else None
    for s, k in pairs(len(tasks)):
        expected = tasks[s].features.numpy() @ (after[k] - after[s])
        parts = decompose(learned, s, k)
        np.testing.assert_allclose(parts.drift, expected, rtol=0, atol=1e-8)
        o = parts.contributions[-1].overlap
        v, w = (learned.factors[j].v for j in (s, k))
        torch.testing.assert_close(o, v @ matrices[k] @ w.T, rtol=0, atol=1e-10)
        bound = bounds(learned, s, k)
        assert 0 < parts.total <= min(bound.tight, bound.unprotected) * (1 + 1e-9)
        assert bound.tight <= bound.valid * (1 + 1e-9)
        if trained is not None:
            np.testing.assert_allclose(trained.drift(s, k), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_methods_own_projections_can_be_given(method):
    tasks = network_tasks("mlp")
    own = learn(tasks, method, weight_decay=0.1)
    matrices = [dense_projection(b) for b in own.bases]
    as_functions = [lambda rows, t=t: rows @ t for t in matrices]
    for given_ones in (as_functions, own.bases):
        again = learn(tasks, given_ones, weight_decay=0.1)
        for s, k in pairs(len(tasks)):
            one, other = decompose(own, s, k), decompose(again, s, k)
            torch.testing.assert_close(one.drift, other.drift, rtol=0, atol=1e-9)
            a, b = bounds(own, s, k), bounds(again, s, k)
            assert a.unprotected == pytest.approx(b.unprotected)
            assert a.tight == pytest.approx(b.tight)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_what_is_unprotected_bounds_what_is_forgotten(method):
    for seed in range(5):
        learned = learn(random_tasks(seed, (6, 5, 7, 5), 30), method, weight_decay=0.1 * seed)
        for s, k in pairs(4):
            total = decompose(learned, s, k).total
            assert total <= bounds(learned, s, k).unprotected * (1 + 1e-9)


def test_the_bound_by_what_is_unprotected_is_reached():
    """One parameter of two is protected, the other moves by 3: both outputs move by 3 · 2."""
    one = LinearTask(torch.tensor([[2.0, 1.0]]), torch.zeros(1), torch.zeros(1))
    two = LinearTask(torch.tensor([[1.0, 5.0]]), torch.full((1,), 3.0), torch.zeros(1))
    keep = torch.tensor([1.0, 0.0]).double()
    learned = learn([one, two], [lambda rows: rows, lambda rows: rows * keep])
    assert decompose(learned, 0, 1).total == pytest.approx(36)
    assert bounds(learned, 0, 1).unprotected == pytest.approx(36)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ([lambda rows: rows], "method must be one for each of 2 tasks, not .1 projections"),
        (
            [lambda rows: rows, lambda rows: rows / 2],
            r"method\[1\] must be an orthogonal projection",
        ),
        (
            [lambda rows: rows, lambda rows: rows[:, [0, 0, *range(2, 9)]]],  # T² = T alone
            r"method\[1\] must be an orthogonal projection",
        ),
        ([lambda rows: rows, lambda rows: rows[:, :3]], r"method\[1\] must be of shape"),
    ],
)
def test_what_is_no_orthogonal_projection_is_rejected(method, message):
    with pytest.raises(ConfigError, match=message):
        learn(random_tasks(0, (5, 6), 9), method)
