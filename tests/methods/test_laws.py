"""What makes each method what it is, as laws on random problems."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from forgetless import (
    AGEM,
    EWC,
    GEM,
    GEMNT,
    OGD,
    PCAOGD,
    SGD,
    Guard,
    Joint,
    TensorScenario,
    Training,
    fit,
)
from forgetless.methods import Samples
from forgetless.methods.ewc import Elastic
from tests.conftest import blobs

seeds = st.integers(0, 2**32 - 1)


def random(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def some_samples(count: int = 1) -> Samples:
    zeros = torch.zeros(2, count)
    return Samples(zeros.unsqueeze(-1), zeros.long(), zeros.long())


class Given:
    """A view of these weights whose first, second, … loss gradient is the one given."""

    def __init__(self, theta: torch.Tensor | None = None, *gradients: torch.Tensor):
        self.theta = theta
        self._next = itertools.cycle(gradients)

    def gradient(self, samples):
        return next(self._next)

    def gradients(self, several):
        return torch.stack([self.gradient(samples) for samples in several], dim=1)


def step(method, g, state, view) -> torch.Tensor:
    changed, after = method.update(g, state, view)
    assert after is state
    return changed


@given(seeds)
def test_agem_never_opposes_the_memory_gradient(seed):
    g, reference, theta = random(seed, 2, 9), random(seed + 1, 2, 9), random(seed, 2, 9)
    result = step(AGEM(), g, some_samples(), Given(theta, reference))
    assert ((result * reference).sum(1) >= -1e-12).all()


@given(seeds)
def test_gem_with_one_memory_and_no_margin_is_agem(seed):
    g, reference, theta = random(seed, 2, 9), random(seed + 1, 2, 9), random(seed, 2, 9)
    gem = step(GEM(), g, (some_samples(),), Given(theta, reference))
    agem = step(AGEM(), g, some_samples(), Given(theta, reference))
    torch.testing.assert_close(gem, agem)


@given(seeds, st.integers(1, 4))
def test_gem_opposes_no_tasks_gradient(seed, tasks):
    references = [random(seed + k, 2, 9) for k in range(1, tasks + 1)]
    state = (some_samples(),) * tasks
    result = step(GEM(), random(seed, 2, 9), state, Given(None, *references))
    for reference in references:
        assert ((result * reference).sum(1) >= -1e-9).all()


@given(seeds, st.integers(1, 4))
def test_gem_nt_is_orthogonal_to_every_tasks_gradient(seed, tasks):
    references = [random(seed + k, 2, 9) for k in range(1, tasks + 1)]
    state = (some_samples(),) * tasks
    result = step(GEMNT(), random(seed, 2, 9), state, Given(None, *references))
    for reference in references:
        assert (result * reference).sum(1).abs().max() < 1e-9


@given(seeds, st.floats(0, 100))
def test_ewc_follows_the_finite_difference_of_its_penalty(seed, strength):
    method = EWC(strength)
    state = Elastic(random(seed, 2, 6).square(), random(seed + 1, 2, 6))
    theta, g = random(seed + 2, 2, 6), random(seed + 3, 2, 6)
    added = step(method, g, state, Given(theta)) - g
    width = 1e-4
    for i in range(theta.shape[1]):
        shift = torch.zeros_like(theta)
        shift[:, i] = width
        up, down = method.penalty(state, theta + shift), method.penalty(state, theta - shift)
        slope = (up - down) / (2 * width)
        torch.testing.assert_close(added[:, i], slope, rtol=1e-6, atol=1e-6 * (1 + strength))


def test_by_default_ewc_has_the_same_strength_for_every_scale_of_gradients():
    """A tenth of the weights' root mean square costs half a nat for each task."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    theta, fisher = nn.utils.parameters_to_vector(model.parameters()).detach(), 0
    x, y = random(0, 20, 6), torch.arange(20) % 3
    for i in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        fisher = fisher + torch.cat([g.flatten() for g in gradients]) ** 2 / len(x)
    states = []
    for scale in (1.0, 1e-3):
        guard = Guard(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            EWC(),
            loss=lambda z, t, scale=scale: scale * nn.functional.cross_entropy(z, t),
        )
        guard.end_task((x, y))
        states.append(guard._steps.state)
    expected = 100 * fisher / (fisher.sum() * theta.square().mean())
    torch.testing.assert_close(states[0].fisher[0], expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(states[1].fisher, states[0].fisher, rtol=1e-9, atol=0)
    moved = theta + 0.1 * theta.square().mean().sqrt()
    assert float(EWC().penalty(states[0], moved.unsqueeze(0))) == pytest.approx(0.5)


def test_springs_by_the_scale_of_a_task_hold_at_any_learning_rate():
    """A step of gradient descent ends where the sum of penalty and squared distance is least."""
    fisher = torch.tensor([[1e6, 1.0, 0.0]], dtype=torch.float64)
    anchor = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    theta = torch.tensor([[2.0, 2.5, 3.5]], dtype=torch.float64)
    g, lr = torch.tensor([[0.3, -0.2, 0.1]], dtype=torch.float64), 0.5
    step, _ = EWC().update(g, Elastic(fisher, anchor), SimpleNamespace(theta=theta, lr=lr))
    # The minimum of ½ Σ f (θ − θ*)² + ‖θ − (θ_t − η g)‖² / 2η, solved as linear equations.
    system = torch.diag(fisher[0] + 1 / lr)
    ends = torch.linalg.solve(system, fisher[0] * anchor[0] + (theta - lr * g)[0] / lr)
    torch.testing.assert_close((theta - lr * step)[0], ends, rtol=1e-9, atol=1e-12)


@given(seeds, st.integers(1, 5))
def test_joint_weighs_every_task_the_same(seed, tasks):
    g, earlier, theta = random(seed, 2, 9), random(seed + 1, 2, 9), random(seed, 2, 9)
    method = Joint()
    view = Given(theta, earlier)
    state = method.init(view)

    class Task:
        size = 1

        def draw(self, count):
            return some_samples(count)

    for _ in range(tasks):
        state = method.consolidate(state, view, Task())
    result = step(method, g, state, view)
    torch.testing.assert_close(result, (g + tasks * earlier) / (tasks + 1))


def linear_model() -> nn.Module:
    return nn.Linear(6, 3)


TRAINING = Training(lr=0.1, epochs=5, batch_size=8, dtype="float64")


def outputs(trace, task: int, inputs: torch.Tensor) -> torch.Tensor:
    weights = trace.weights(0, task)
    return inputs.double() @ weights["weight"].T + weights["bias"]


@pytest.mark.parametrize("seed", range(3))
def test_a_linear_model_under_ogd_that_stores_everything_forgets_nothing(seed):
    tasks = blobs(tasks=3, n=2, seed=seed)
    trace = fit(tasks, OGD(samples=100), linear_model, training=TRAINING)
    plain = fit(tasks, SGD(), linear_model, training=TRAINING)
    for t in range(2):
        train = tasks.task(t, [0]).train
        true = train.labels.unsqueeze(1)
        before, after = (outputs(trace, s, train.inputs).gather(1, true) for s in (t, 2))
        torch.testing.assert_close(before, after, atol=1e-10, rtol=0)
        moved = outputs(plain, 2, train.inputs).gather(1, true) - before
        assert moved.abs().max() > 1e-2  # it is the projection that holds them still


@pytest.mark.parametrize("seed", range(3))
def test_pca_ogd_with_all_components_is_ogd_on_the_same_samples(seed):
    tasks = blobs(tasks=3, n=8, seed=seed)

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    traces = [
        fit(tasks, method, network, training=TRAINING)
        for method in (OGD(samples=8), PCAOGD(components=8, samples=8))
    ]
    for name, weight in traces[0].weights(0, 2).items():
        torch.testing.assert_close(weight, traces[1].weights(0, 2)[name], atol=1e-8, rtol=0)


def test_duplicated_samples_protect_as_much_as_single_ones():
    single = blobs(tasks=2, n=6)
    doubled = []
    for t in range(2):
        task = single.task(t, [0])
        train = task.train.inputs.repeat(3, 1), task.train.labels.repeat(3)
        doubled.append((train, (task.test.inputs, task.test.labels)))
    trace = fit(TensorScenario(doubled), OGD(samples=18), linear_model, training=TRAINING)
    directions = trace.state(0)["directions"]
    assert len(directions) <= 12
    identity = torch.eye(len(directions), dtype=torch.float64)
    torch.testing.assert_close(directions @ directions.T, identity, atol=1e-12, rtol=0)


def test_the_directions_kept_are_those_of_numpys_svd():
    """PCA-OGD's memory after one task against a dense SVD of a loop's gradients."""
    tasks = blobs(tasks=1, n=10)
    trace = fit(tasks, PCAOGD(components=3, samples=10), linear_model, training=TRAINING)
    train = tasks.task(0, [0]).train
    rows = []
    for x, y in zip(train.inputs.double(), train.labels, strict=True):
        weight = torch.zeros(3, 6, dtype=torch.float64)
        weight[y] = x
        rows.append(torch.cat([weight.flatten(), nn.functional.one_hot(y, 3).double()]))
    _, _, v = torch.linalg.svd(torch.stack(rows), full_matrices=False)
    directions = trace.state(0)["directions"]
    torch.testing.assert_close(
        (directions @ v[:3].T).abs(), torch.eye(3).double(), atol=1e-7, rtol=0
    )
