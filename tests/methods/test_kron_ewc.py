"""KronEWC's penalty and moments against autograd, and how its strength follows what is kept."""

from dataclasses import dataclass
from typing import ClassVar, final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from forgetless import SGD, Guard, KronEWC, Method, TensorScenario, Training, fit
from forgetless.linalg import Layout
from forgetless.methods.kfac_laplace import Posterior
from forgetless.methods.kron_ewc import Springs
from forgetless.subspace import DENSE
from forgetless.subspace.eigenbasis import Eigenbasis
from forgetless.tangent import Moments

SHAPES = {"0.weight": (4, 3), "0.bias": (4,), "1.weight": (2, 4, 1, 1), "2.weight": (5,)}


def random(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def square(d, seed):
    rows = random(2, d, d, seed=seed)
    return rows @ rows.mT


class Given:
    """A view of these moments and weights, for two seeds."""

    layout, storage = Layout(SHAPES), DENSE

    def __init__(self, seed, lr=0.0):
        self.lr = lr
        self.theta = random(2, self.layout.size, seed=seed)
        a = square(4, seed + 1)
        a = a / a[:, -1:, -1:]  # the last input is a one
        outputs = {"0.weight": square(4, seed + 2), "1.weight": square(2, seed + 3)}
        inputs = {"0.weight": a, "1.weight": square(4, seed + 4)}
        source = {name: name for name in inputs}
        squares = {"2.weight": random(2, 5, seed=seed + 5).square()}
        biases, scalars = {"0.weight": "0.bias"}, torch.zeros(2)
        self.given = Moments(outputs, inputs, source, biases, squares, 10, scalars)

    def moments(self, samples, outputs):
        assert outputs == "mixed"
        return self.given


class Task:
    def draw(self, count):
        return None


def stored(method, tasks):
    views = [Given(10 * number) for number in range(tasks)]
    state = method.init(views[0])
    for view in views:
        state = method.consolidate(state, view, Task())
    return state, views


def dense(tasks, seed, shrinkage):
    """The sum of the tasks' moments over one seed's weights, (p, p), by Kronecker products."""
    layout, count = Layout(SHAPES), len(tasks)
    whole = torch.zeros(layout.size, layout.size, dtype=torch.float64)
    for name in ("0.weight", "1.weight"):
        g = sum(t.given.outputs[name][seed] / 10 for t in tasks) / count
        g = (1 - shrinkage) * g + shrinkage * g.trace() / len(g) * torch.eye(len(g))
        a = sum(t.given.inputs[name][seed] for t in tasks) / count
        index = torch.arange(layout.size)[layout.columns[name]].view(len(g), -1)
        if name == "0.weight":
            index = torch.cat(
                [index, torch.arange(layout.size)[layout.columns["0.bias"]].unsqueeze(1)], 1
            )
        flat = index.flatten()
        whole[flat.unsqueeze(1), flat] = count * torch.kron(g, a)
    columns = layout.columns["2.weight"]
    squares = sum(t.given.squares["2.weight"][seed] / 10 for t in tasks)
    whole[columns, columns] = torch.diag(squares)
    return whole


@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("lr", [0.0, 0.3])
def test_it_follows_its_dense_formula(tasks, lr):
    """The step's end has the gradient of ½ λ (θ − θ*)ᵀ F (θ − θ*) that is followed."""
    method = KronEWC(strength=0.7, shrinkage=0.25)
    state, views = stored(method, tasks)
    view, g = Given(99, lr), random(2, Layout(SHAPES).size, seed=98)
    found, after = method.update(g, state, view)
    assert after is state
    for seed in (0, 1):
        fisher = 0.7 * dense(views, seed, 0.25)
        after_step = view.theta[seed] - lr * found[seed]
        moved = (after_step - views[-1].theta[seed]).requires_grad_()
        (pull,) = torch.autograd.grad(moved @ fisher @ moved / 2, moved)
        torch.testing.assert_close(found[seed], g[seed] + pull, rtol=1e-7, atol=1e-7)


def test_its_moments_are_those_of_mixed_labels():
    """A linear classifier on one input x: Σ_k q_k (e_k − p)(e_k − p)ᵀ ⊗ x xᵀ, q = .9 p + .1 / C."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    method = KronEWC(strength=1.0, samples=20000, shrinkage=0.0)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1), method, seed=1)
    x = torch.tensor([[0.5, -1.0, 2.0, 0.1]], dtype=torch.float64)
    guard.end_task((x.expand(20000, -1), torch.zeros(20000, dtype=torch.long)))
    p = torch.softmax(model(x), 1)[0].detach()
    q, residuals = 0.9 * p + 0.1 / 3, torch.eye(3, dtype=torch.float64) - p
    exact = torch.einsum("k,ki,kj->ij", q, residuals, residuals)
    basis = guard._steps.state.posterior.basis
    outputs, inputs = basis.sides("weight")
    extended = torch.cat([x[0], torch.ones(1, dtype=torch.float64)])
    torch.testing.assert_close(inputs.moment()[0], torch.outer(extended, extended))
    assert (outputs.moment()[0] - exact).norm() < 0.03 * exact.norm()


def test_of_a_sequence_the_moments_are_the_mean_over_its_labels():
    sizes = {}
    for repeats in (1, 4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)).double()
        guard = Guard(
            model, torch.optim.SGD(model.parameters(), lr=1), KronEWC(), output="tokens",
            drift_samples=0,
        )  # fmt: skip
        tokens = torch.arange(5).repeat(400, 1).view(-1, 1).expand(-1, repeats)
        guard.end_task((tokens, tokens))
        sizes[repeats] = float(guard._steps.state.posterior.basis.total()[0])
    assert sizes[4] == pytest.approx(sizes[1], rel=0.1)


@given(st.floats(1e-3, 1e9), st.sampled_from([0.0, 0.5, 0.9]))
@settings(max_examples=20, deadline=None)
def test_no_strength_makes_gradient_descent_diverge(strength, momentum):
    """Without a loss it comes back to the anchor from anywhere, however stiff the springs are."""
    method = KronEWC(strength=strength)
    state, views = stored(method, 1)
    view, velocity = Given(99, lr=0.1), 0.0
    anchor = views[0].theta
    first = (view.theta - anchor).norm()
    for _ in range(200):
        pull, _ = method.update(torch.zeros_like(anchor), state, view)
        velocity = momentum * velocity + pull
        view.theta = view.theta - view.lr * velocity
        assert (view.theta - anchor).norm() < 10 * first
    assert (view.theta - anchor).norm() <= first


def springs(strength):
    nothing = Posterior(Eigenbasis.empty(), 1, torch.zeros(1, 2))
    return Springs(nothing, torch.tensor([strength], dtype=torch.float64))


@pytest.mark.parametrize(
    ("harm", "before", "after"),
    [
        ([0.0, 0.4, 0.1], 20.0, 40.0),  # the worst task counts
        ([0.3], 20.0, 30.0),
        ([0.2], 20.0, 20.0),
        ([9.0], 20.0, 80.0),
        ([float("nan")], 20.0, 80.0),
        ([9.0], 9000.0, 30000.0),  # the most
        ([-1.0], 20.0, 16.0),
        ([0.0], 11.0, 10.0),  # never below the least
    ],
)
def test_the_strength_follows_the_harm(harm, before, after):
    def told(anchor):
        assert anchor.shape == (1, 2)
        return torch.tensor([harm], dtype=torch.float64)

    method, state = KronEWC(strength=10.0, tolerance=0.2), springs(before)
    found = method.adapted(state, told)
    assert found.strength.tolist() == pytest.approx([after])
    assert method.metrics(found) == {"strength": pytest.approx(after)}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).double()


def labelled(shift, seed=0):
    """Three clusters; a shift gives them other labels."""
    y = torch.arange(60) % 3
    return 3 * torch.eye(6, dtype=torch.float64)[y] + random(60, 6, seed=seed) / 2, (y + shift) % 3


def trained(guarded, optimizer, x, y, count=300):
    for _ in range(count):
        optimizer.zero_grad()
        cross_entropy(guarded(x), y).backward()
        optimizer.step()


def after_conflict(**options):
    """The model and its guard, after other labels for the same inputs."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, KronEWC(0.01), **options)
    trained(model, optimizer, *labelled(0))
    guard.end_task(labelled(0))
    trained(model, optimizer, *labelled(1))
    return model, guard


def test_a_guard_makes_it_stronger_until_a_task_that_is_forgotten_comes_back():
    losses = {}
    for samples in (0, 16):
        model, guard = after_conflict(drift_samples=samples)
        x, y = labelled(0)
        losses[samples] = cross_entropy(model(x), y).item()
        strength = guard.stats().method["strength"]
        assert (strength > 0.1) == (samples > 0)
        assert f"strength {strength:.4g}" in str(guard.stats())
        assert guard.metrics()["strength"] == strength
    assert losses[16] < 0.5 * losses[0]  # the same inputs cannot have both labels


def test_it_resumes_with_the_strength_it_had():
    def learner():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, Guard(model, optimizer, KronEWC(0.1))

    model, optimizer, guard = learner()
    trained(model, optimizer, *labelled(0))
    guard.end_task(labelled(0))
    trained(model, optimizer, *labelled(1), count=25)
    again, resumed, other = learner()
    again.load_state_dict(model.state_dict())
    other.load_state_dict(guard.state_dict())
    for one, its in ((model, optimizer), (again, resumed)):
        trained(one, its, *labelled(1), count=25)
    assert other.metrics()["strength"] == guard.metrics()["strength"] > 0.1
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_statistics_of_batch_norm_are_no_harm_of_the_weights():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the weights do not move
    guard = Guard(model, optimizer, KronEWC())
    trained(model, optimizer, *labelled(0), count=20)
    guard.end_task(labelled(0))
    x, y = labelled(1)
    trained(model, optimizer, 5 * x - 3, y, count=100)
    assert guard.drift().tasks[0].drift > 0.1
    assert guard.metrics()["strength"] == guard.method.strength


def test_what_it_stores_does_not_grow():
    sizes = []
    for tasks in (1, 4):
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()
        guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert guard.method == KronEWC()
        for number in range(tasks):
            guard.end_task(labelled(0, seed=number))
        sizes.append(guard.memory_report().bytes)
    assert sizes[0] == sizes[1]


def test_in_fit_it_keeps_more_than_training_alone(digits):
    training = Training(lr=0.1, epochs=5, dtype="float64")
    kept = [
        fit(digits, method, seeds=[0], training=training).summary()["forgetting"]["mean"]
        for method in (SGD(), KronEWC())
    ]
    assert kept[1] < 0.7 * kept[0]


def test_in_fit_it_makes_it_stronger_for_the_seeds_whose_tasks_are_forgotten():
    """The second task has other labels for the same inputs."""
    pairs = [(labelled(shift), labelled(shift, seed=1)) for shift in (0, 1)]
    training = Training(lr=0.1, epochs=40, batch_size=10, dtype="float64")

    def trained_by(tolerance, seeds):
        method = KronEWC(0.01, tolerance)
        return fit(TensorScenario(pairs), method, network(), seeds=seeds, training=training)

    def loss(trace, seed):
        model = network()
        model.load_state_dict(trace.weights(seed, 1))
        x, y = labelled(0)
        return cross_entropy(model(x), y).item()

    both, never = (trained_by(tolerance, [0, 1]) for tolerance in (0.2, 1e9))
    for seed in (0, 1):
        assert loss(both, seed) < 0.6 * loss(never, seed), (loss(both, seed), loss(never, seed))
    alone = trained_by(0.2, [1])
    torch.testing.assert_close(alone.weights(1, 1), both.weights(1, 1))


def test_in_fit_it_compares_the_losses_with_those_at_the_anchor():
    """Sixteen samples of each task, and a look after every ten steps for each stored task."""
    told = []

    @final
    @dataclass(frozen=True)
    class Told(Method[int]):
        name: ClassVar[str] = "told"
        acts_on = "gradient"
        adapts: ClassVar[bool] = True

        def init(self, view):
            return torch.zeros(len(view.theta), 1)

        def update(self, g, state, view):
            return g, state

        def consolidate(self, state, view, task):
            return state + 1

        def adapted(self, state, harm):
            told.append((int(state[0]), harm(torch.zeros(len(state), 163, dtype=torch.float64))))
            return state

    training = Training(lr=0.1, epochs=2, batch_size=6, dtype="float64")
    pairs = [(labelled(shift), labelled(shift)) for shift in (0, 1, 2)]
    fit(TensorScenario(pairs), Told(), network(), training=training)
    # Twenty steps a task: looks at 30 and 40 with one task stored, and at 60 with two.
    assert [(state, tuple(h.shape)) for state, h in told] == [(1, (1, 1)), (1, (1, 1)), (2, (1, 2))]
    assert all(bool((h != 0).all()) for _, h in told)
