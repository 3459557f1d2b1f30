"""The replay methods against their papers' formulas in plain autograd, and the reservoir's law."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import binomtest, chisquare
from torch.nn.functional import cross_entropy, mse_loss

from forgetless import DER, DERPP, ER, ERACE, ConfigError, Guard, Training, fit, scenario
from forgetless.methods import Samples
from forgetless.methods.reservoir import ReplayBuffer
from forgetless.support.streams import random_subset, stream
from tests.methods.formula import (
    BATCH,
    EPOCHS,
    LR,
    OPTIMIZERS,
    SEED,
    Plain,
    assert_weights,
    by_formula,
    gradient,
    guarded,
)

HELD, DRAWN = 20, 8
METHODS = {
    "er": ER(HELD, DRAWN),
    "er-ace": ERACE(HELD, DRAWN),
    "der": DER(HELD, DRAWN, alpha=0.3),
    "der++": DERPP(HELD, DRAWN, alpha=0.3, beta=0.7),
}


class Replay(Plain):
    """A list of samples with their outputs, filled one by one as Vitter's algorithm R says."""

    def begin(self, model):
        self.held, self.seen = [], 0
        self.random = stream(SEED, "memory batches")

    def drawn(self):
        held = self.held
        if len(held) > DRAWN:
            held = [held[i] for i in random_subset(DRAWN, len(held), self.random).tolist()]
        return [torch.stack(rows) for rows in zip(*held, strict=True)]

    def step(self, model, x, y, g):
        g = self.replayed(model, x, y, g)
        numbers = torch.rand(len(x), dtype=torch.float64, generator=self.random).tolist()
        for row, number in zip(zip(x, y, model(x).detach(), strict=True), numbers, strict=True):
            place = int(number * (self.seen + 1))
            if self.seen < HELD:
                self.held.append(row)
            elif place < HELD:
                self.held[place] = row
            self.seen += 1
        return g


class PlainER(Replay):
    """One batch of both, as the released code concatenates them."""

    def replayed(self, model, x, y, g):
        if self.held:
            inputs, labels, _ = self.drawn()
            g = gradient(model, self.loss(model, torch.cat([x, inputs]), torch.cat([y, labels])))
        return g


class PlainERACE(Replay):
    """The paper's L(X_in; C_curr) + L(X_bf; C_old ∪ C_curr)."""

    def replayed(self, model, x, y, g):
        present = y.unique()  # and the labels' places among them
        total = cross_entropy(model(x)[:, present], torch.searchsorted(present, y))
        if self.held:
            inputs, labels, _ = self.drawn()
            total = total + self.loss(model, inputs, labels)
        return gradient(model, total)


class PlainDER(Replay):
    """The loss plus α times the mean squared error of the outputs."""

    def replayed(self, model, x, y, g):
        total = self.loss(model, x, y)
        if self.held:
            inputs, _, outputs = self.drawn()
            total = total + 0.3 * mse_loss(model(inputs), outputs)
        return gradient(model, total)


class PlainDERPP(Replay):
    """The same plus β times the loss on another batch."""

    def replayed(self, model, x, y, g):
        total = self.loss(model, x, y)
        if self.held:
            inputs, _, outputs = self.drawn()
            total = total + 0.3 * mse_loss(model(inputs), outputs)
            inputs, labels, _ = self.drawn()
            total = total + 0.7 * self.loss(model, inputs, labels)
        return gradient(model, total)


PLAIN = {"er": PlainER, "er-ace": PlainERACE, "der": PlainDER, "der++": PlainDERPP}
TRAINING = Training(epochs=EPOCHS, batch_size=BATCH, dtype="float64", lr=LR)
every_replay = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(scope="module")
def classes():
    """Three tasks of two digits in one head."""
    return scenario("split-digits", tasks=3, train_per_class=20, setting="class")


@every_replay
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_a_guard_it_does_what_its_formula_says(name, optimizer, digits):
    found = guarded(digits, METHODS[name], OPTIMIZERS[optimizer])
    assert_weights(found, by_formula(digits, PLAIN[name](), OPTIMIZERS[optimizer]))


@every_replay
def test_in_fit_among_the_classes_seen_so_far(name, classes):
    trace = fit(classes, METHODS[name], seeds=[SEED], training=TRAINING)
    assert_weights(trace.weights(SEED, 2), by_formula(classes, PLAIN[name](), OPTIMIZERS["sgd"]))


@every_replay
def test_in_fit_with_adamw_beside_another_seed(name, classes):
    training = replace(TRAINING, optimizer="adamw", lr=1e-3, weight_decay=0.1, seeds_together=2)
    trace = fit(classes, METHODS[name], seeds=[7, SEED], training=training)
    expected = by_formula(classes, PLAIN[name](), OPTIMIZERS["adamw"], anew=True)
    assert_weights(trace.weights(SEED, 2), expected)


def test_the_methods_differ(digits):
    """Or else the formulas would agree for nothing."""
    found = [fit(digits, method, training=TRAINING).weights(0, 2) for method in METHODS.values()]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert not torch.allclose(one["head.weight"], other["head.weight"], atol=1e-4)


class Passing:
    """A view of a stream of numbered samples, some a batch, for many seeds."""

    def __init__(self, seeds, size):
        self.seeds, self.size, self.next = seeds, size, 0
        self.generator = torch.Generator().manual_seed(0)

    def advance(self):
        numbers = torch.arange(self.next, self.next + self.size).expand(self.seeds, -1)
        self.next += self.size
        self.batch = Samples(numbers.double().unsqueeze(-1), numbers, torch.zeros_like(numbers))

    def random(self, count):
        return torch.rand(self.seeds, count, dtype=torch.float64, generator=self.generator)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_every_sample_that_came_by_is_in_it_with_equal_chance(size):
    """For each sample SciPy's exact test of the binomial, all together its χ² test."""
    view, state, capacity, batches = Passing(4000, size), ReplayBuffer(), 5, 48 // size
    for _ in range(batches):
        view.advance()
        state = state.with_batch(capacity, view, lambda stored, view: (stored, view.batch))
    held = state.samples.labels
    assert held.shape == (4000, capacity)
    assert (held.sort(1).values.diff(dim=1) > 0).all()  # none twice
    torch.testing.assert_close(state.samples.inputs[..., 0], held.double())
    counts = held.flatten().bincount(minlength=48).tolist()
    assert all(binomtest(c, 4000, capacity / 48).pvalue > 1e-5 for c in counts)
    assert chisquare(counts).pvalue > 1e-4


def test_a_reservoir_that_is_not_full_has_all_samples_in_their_order():
    view, state = Passing(2, 4), ReplayBuffer()
    for seen in (4, 8, 12):
        view.advance()
        state = state.with_batch(10, view, lambda stored, view: (stored, view.batch))
        assert len(state.samples) == min(seen, 10)
        if seen <= 10:
            assert state.samples.labels[1].tolist() == list(range(seen))


@pytest.mark.parametrize("name", ["der", "der++"])
def test_a_head_that_grows_is_compared_in_the_outputs_that_a_sample_had(name):
    torch.manual_seed(0)
    method = replace(METHODS[name], buffer=64)
    x, y = torch.randn(16, 6, dtype=torch.float64), torch.arange(16) % 3

    def network(outputs):
        return torch.nn.Linear(6, outputs).double()

    model = network(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, method)

    def step():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        guard.observe((x, y))
        optimizer.step()

    step()
    guard.end_task((x, y))
    grown = network(5)
    with torch.no_grad():
        grown.weight[:3], grown.bias[:3] = model.weight, model.bias
    then = model(x).detach()  # after a step from other outputs
    model, optimizer = grown, torch.optim.SGD(grown.parameters(), lr=0.1)
    guard.adopt(model, optimizer)
    y = torch.arange(16) % 5
    before = [p.detach().clone() for p in model.parameters()]
    first = guard._steps.state.samples.extra["outputs"][0]
    assert first.shape == (16, 3)
    total = cross_entropy(model(x), y)
    index = random_order(guard)
    chosen = first[index[0]]
    total = total + 0.3 * mse_loss(model(x[index[0]])[:, :3], chosen)
    if name == "der++":
        total = total + 0.7 * cross_entropy(model(x[index[1]]), (torch.arange(16) % 3)[index[1]])
    expected = torch.autograd.grad(total, list(model.parameters()))
    step()
    for p, old, g in zip(model.parameters(), before, expected, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.1 * g)
    extra = guard._steps.state.samples.extra
    assert extra["outputs"].shape == (1, 32, 5)
    assert extra["known"][0, :16].tolist() == [[True] * 3 + [False] * 2] * 16
    assert extra["known"][0, 16:].all()
    step()  # and old and new samples together
    assert all(p.isfinite().all() for p in model.parameters())
    assert not torch.equal(then, model(x)[:, :3])


def random_order(guard):
    """The two choices of stored samples that the guard's next step would draw."""
    generator = torch.Generator()
    generator.set_state(guard._generators[1].get_state())
    return [random_subset(DRAWN, 16, generator) for _ in range(2)]


@every_replay
def test_an_unseen_batch_is_one_clear_error(name):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Guard(model, optimizer, METHODS[name])
    model(torch.randn(5, 4)).sum().backward()
    with pytest.raises(ConfigError, match=r"call guard.observe\(batch\) before every"):
        optimizer.step()


def test_er_ace_needs_classes():
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, METHODS["er-ace"])
    model(torch.randn(5, 4)).sum().backward()
    guard.observe((torch.randn(5, 4), torch.randn(5, 3)))
    message = r"the class of every sample, integers \(n,\), and labels are torch.float32"
    with pytest.raises(ConfigError, match=message):
        optimizer.step()
