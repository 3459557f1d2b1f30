"""Laws of the linearised learner."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgetless.support.validation import TrainingError
from forgetless.theory import (
    ComponentProjection,
    Descent,
    GradientProjection,
    LinearTask,
    NoProjection,
    SampleProjection,
    learn,
    remembered,
)
from tests.theory.problems import METHODS, dense_projection, network_tasks, random_tasks

seeds = st.integers(0, 10_000)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.7])
def test_the_projected_gradient_of_the_halved_objective_vanishes(method, weight_decay):
    tasks = network_tasks("mlp")
    solved = learn(tasks, method, weight_decay=weight_decay)
    for k, task in enumerate(tasks):
        step = solved.steps[k].clone().requires_grad_()
        before = solved.predict(task.features, task.outputs)[k]
        error = before + task.features @ step - task.targets
        loss = error.square().sum() / 2 + weight_decay * step.square().sum() / 2
        (gradient,) = torch.autograd.grad(loss, step)
        projection = dense_projection(solved.bases[k])
        assert float((projection @ gradient).norm()) < 1e-9
        assert float((solved.bases[k] @ solved.steps[k]).norm()) < 1e-12


def test_predictions_are_recursive():
    tasks = network_tasks("mlp")
    solved = learn(tasks, ComponentProjection(2), weight_decay=0.1)
    f = solved.predict(tasks[2].features, tasks[2].outputs)
    assert f.shape == (5, 8)
    torch.testing.assert_close(f[0], tasks[2].outputs)
    for k in range(4):
        torch.testing.assert_close(f[k + 1], f[k] + tasks[2].features @ solved.steps[k])


@given(seed=seeds, n=st.integers(1, 5), p=st.integers(1, 12), whole=st.booleans())
def test_ogd_that_stores_all_samples_forgets_none(seed, n, p, whole):
    tasks = random_tasks(seed, (n, n + 1, n), p, whole=whole)
    for method in (SampleProjection(), ComponentProjection()):
        solved = learn(tasks, method)
        for s, t in ((0, 1), (0, 2), (1, 2)):
            assert float(solved.drift(s, t).square().sum()) < 1e-16


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_ogd_keeps_the_stored_samples_and_moves_others(weight_decay):
    tasks = network_tasks("cnn")
    kept = (torch.tensor([0, 4]), torch.tensor([1, 2, 6]), torch.tensor([5]))
    solved = learn(tasks, SampleProjection(kept), weight_decay=weight_decay)
    for s, index in enumerate(kept):
        drift = solved.drift(s, 3)
        assert float(drift[index].abs().max()) < 1e-12
        others = torch.ones(len(drift), dtype=torch.bool).index_fill(0, index, False)
        assert float(drift[others].abs().min()) > 1e-4


@given(seed=seeds, whole=st.booleans(), weight_decay=st.sampled_from([0.0, 0.5]))
def test_pca_ogd_with_all_components_is_ogd_with_all_samples(seed, whole, weight_decay):
    tasks = random_tasks(seed, (3, 4, 3), 8, whole=whole)
    a = learn(tasks, SampleProjection(), weight_decay=weight_decay)
    b = learn(tasks, ComponentProjection(), weight_decay=weight_decay)
    torch.testing.assert_close(a.steps, b.steps, rtol=1e-7, atol=1e-7)


def test_a_duplicated_sample_changes_nothing_without_weight_decay():
    tasks = random_tasks(3, (4, 4, 4), 20)
    twice = [
        LinearTask(*(torch.cat([t, t[:2]]) for t in (task.features, task.targets, task.outputs)))
        for task in tasks
    ]
    for method in (NoProjection(), SampleProjection()):
        a, b = learn(tasks, method), learn(twice, method)
        assert [f.rank for f in b.factors] == [4, 4, 4]
        torch.testing.assert_close(a.steps, b.steps, rtol=1e-9, atol=1e-9)


def test_contradicting_targets_are_met_halfway():
    row = torch.tensor([[1.0, 2.0]])
    task = LinearTask(torch.cat([row, row]), torch.tensor([0.0, 2.0]), torch.zeros(2))
    solved = learn([task], NoProjection())
    torch.testing.assert_close(solved.steps[0], torch.tensor([0.2, 0.4], dtype=torch.float64))


def test_a_task_inside_what_is_protected_does_not_move():
    first, _ = random_tasks(0, (4, 4), 6)
    inside = LinearTask(first.features[:2] * 3, first.targets[:2] + 1, first.outputs[:2])
    for solver in (None, Descent()):
        solved = learn([first, inside], SampleProjection(), solver=solver)
        assert float(solved.steps[1].norm()) < 1e-13


def test_features_of_zero_learn_nothing():
    nothing = LinearTask(torch.zeros(3, 4), torch.ones(3), torch.zeros(3))
    other = random_tasks(0, (3,), 4)[0]
    for method in METHODS.values():
        method = {
            SampleProjection: SampleProjection(2),
            GradientProjection: GradientProjection(2),
            ComponentProjection: ComponentProjection(2),
        }.get(type(method), method)
        solved = learn([nothing, other, nothing], method)
        assert not solved.steps[0].any()
        assert not solved.steps[2].any()
        assert solved.steps[1].any()


def test_gem_nt_does_not_protect_a_task_with_zero_loss():
    # λ = 0 and no conflict: the gradient of the task just learned is zero, so task 2 is SGD's.
    tasks = random_tasks(1, (3, 3, 3), 20)
    solved = learn(tasks, GradientProjection())
    assert [len(b) for b in solved.bases] == [0, 0, 1]
    torch.testing.assert_close(solved.steps[1], learn(tasks, NoProjection()).steps[1])
    assert [len(b) for b in learn(tasks, GradientProjection(), weight_decay=0.1).bases] == [0, 1, 2]


@pytest.mark.parametrize("weight_decay", [0.0, 0.4])
def test_what_is_left_of_a_task_is_drift_and_weight_decay(weight_decay):
    # f_t(X_s) − y_s = δ^{s→t} − λ (κ_s + λ I)⁻¹ ỹ_s; the paper prints ỹ_s + δ^{s→t}.
    tasks = network_tasks("mlp")
    solved = learn(tasks, ComponentProjection(2), weight_decay=weight_decay)
    for s, t in ((0, 2), (1, 3)):
        phi = tasks[s].features
        kernel = phi @ dense_projection(solved.bases[s]) @ phi.T
        inverse = torch.linalg.inv(kernel + weight_decay * torch.eye(len(phi), dtype=phi.dtype))
        left = solved.predict(phi, tasks[s].outputs)[t + 1] - tasks[s].targets
        expected = solved.drift(s, t) - weight_decay * inverse @ solved.residuals[s]
        torch.testing.assert_close(left, expected, rtol=1e-9, atol=1e-9)


def test_weight_decay_pulls_towards_the_previous_task():
    tasks = random_tasks(0, (3, 3), 10)
    strong = learn(tasks, NoProjection(), weight_decay=1e9)
    assert float(strong.steps.norm()) < 1e-7
    stays = [tasks[0], LinearTask(tasks[1].features, tasks[1].targets, tasks[1].outputs)]
    first = learn(stays[:1], NoProjection(), weight_decay=0.1)
    met = stays[1].outputs + stays[1].features @ first.steps[0]
    stays[1] = LinearTask(stays[1].features, met, stays[1].outputs)
    assert float(learn(stays, NoProjection(), weight_decay=0.1).steps[1].norm()) < 1e-12


def test_descent_with_and_without_momentum_end_at_the_same_place():
    tasks = random_tasks(5, (4, 4), 12)
    for weight_decay in (0.0, 0.5):
        ends = [
            learn(
                tasks,
                SampleProjection(2),
                weight_decay=weight_decay,
                solver=Descent(accelerated=fast),
            ).steps
            for fast in (True, False)
        ]
        torch.testing.assert_close(*ends, rtol=1e-8, atol=1e-9)


def test_descent_that_does_not_converge_says_so():
    tasks = random_tasks(5, (4,), 12)
    with pytest.raises(TrainingError, match="not converged in 3 steps"):
        learn(tasks, NoProjection(), solver=Descent(max_steps=3))


def test_a_memory_is_drawn_from_its_seed_alone():
    state = torch.random.get_rng_state()
    a, b = remembered(5, 3, 1, 50), remembered(5, 3, 1, 50)
    assert torch.equal(a, b)
    assert len(set(a.tolist())) == 5
    assert not torch.equal(a, remembered(5, 4, 1, 50))
    assert not torch.equal(a, remembered(5, 3, 2, 50))
    learn(random_tasks(0, (6, 6), 9), SampleProjection(3))
    assert torch.equal(state, torch.random.get_rng_state())


def test_what_carries_a_graph_is_let_go():
    (task,) = random_tasks(0, (3,), 6)
    attached = LinearTask(
        *(t.clone().requires_grad_() for t in (task.features, task.targets, task.outputs))
    )
    solved = learn([attached, attached], SampleProjection(2))
    assert not solved.steps.requires_grad
    assert not solved.residuals[1].requires_grad


def test_float32_features_are_worked_on_in_float64():
    tasks = random_tasks(0, (3, 3), 6)
    single = [LinearTask(t.features.float(), t.targets.float(), t.outputs.float()) for t in tasks]
    solved = learn(single, SampleProjection(2))
    assert solved.steps.dtype == torch.float64
    torch.testing.assert_close(
        solved.steps, learn(tasks, SampleProjection(2)).steps, rtol=1e-4, atol=1e-4
    )
