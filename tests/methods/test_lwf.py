"""LwF against its formula in plain autograd, in all three settings and with a growing head."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from forgetless import ConfigError, Guard, LwF, Training, fit, scenario
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

METHOD = LwF(strength=0.8, temperature=3.0)


class PlainLwF(Plain):
    """The mean over the batch of λ T² Σ p log(p / q), for each group of outputs apart."""

    def __init__(self, groups=lambda learned: [list(range(10))]):
        self.groups, self.old, self.learned = groups, None, 0

    def step(self, model, x, y, g):
        if self.old is None:
            return g
        total = 0
        for group in self.known:
            with torch.no_grad():
                p = softmax(self.old(x)[:, group] / 3, 1)
            q = softmax(model(x)[:, group] / 3, 1)
            total = total + (p * (p / q).log()).sum(1).mean()
        return g + 0.8 * gradient(model, 9 * total)

    def end(self, model, x, y):
        self.old = copy.deepcopy(model)
        self.learned += 1
        self.known = self.groups(self.learned)


TRAINING = Training(epochs=EPOCHS, batch_size=BATCH, dtype="float64", lr=LR)
SETTINGS = {
    "domain": lambda learned: [[0, 1]],
    "task": lambda learned: [[2 * t, 2 * t + 1] for t in range(learned)],
    "class": lambda learned: [list(range(2 * learned))],
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_a_guard_it_does_what_its_formula_says(optimizer, digits):
    found = guarded(digits, METHOD, OPTIMIZERS[optimizer])
    assert_weights(found, by_formula(digits, PlainLwF(), OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("setting", SETTINGS)
def test_in_fit_each_earlier_task_has_a_softmax_over_its_outputs(setting):
    tasks = scenario("split-digits", tasks=3, train_per_class=20, setting=setting)
    trace = fit(tasks, METHOD, seeds=[SEED], training=TRAINING)
    rule = PlainLwF(SETTINGS[setting])
    assert_weights(trace.weights(SEED, 2), by_formula(tasks, rule, OPTIMIZERS["sgd"]))


def test_in_fit_with_adamw_beside_another_seed(digits):
    training = replace(TRAINING, optimizer="adamw", lr=1e-3, weight_decay=0.1, seeds_together=2)
    trace = fit(digits, METHOD, seeds=[7, SEED], training=training)
    expected = by_formula(digits, PlainLwF(), OPTIMIZERS["adamw"], anew=True)
    assert_weights(trace.weights(SEED, 2), expected)


def test_a_head_that_grows_is_compared_in_the_former_outputs():
    torch.manual_seed(0)
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.arange(12) % 3
    model = torch.nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, METHOD)
    guard.end_task((x, y))
    former, grown = copy.deepcopy(model), torch.nn.Linear(6, 5).double()
    with torch.no_grad():
        grown.weight[:3], grown.bias[:3] = model.weight, model.bias
    optimizer = torch.optim.SGD(grown.parameters(), lr=0.1)
    guard.adopt(grown, optimizer)
    y = torch.arange(12) % 5
    for _ in range(3):
        q = log_softmax(grown(x)[:, :3] / 3, 1)
        p = softmax(former(x) / 3, 1).detach()
        total = cross_entropy(grown(x), y) + 0.8 * 9 * kl_div(q, p, reduction="batchmean")
        expected = [
            p.detach() - 0.1 * g
            for p, g in zip(
                grown.parameters(),
                torch.autograd.grad(total, list(grown.parameters())),
                strict=True,
            )
        ]
        optimizer.zero_grad()
        cross_entropy(grown(x), y).backward()
        guard.observe((x, y))
        optimizer.step()
        for found, wanted in zip(grown.parameters(), expected, strict=True):
            torch.testing.assert_close(found.detach(), wanted)
    guard.end_task((x, y))
    assert guard._steps.state.outputs.tolist() == [[[True] * 5]]  # the three are among them


def test_an_unseen_batch_is_one_clear_error():
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, METHOD)
    guard.end_task((torch.randn(8, 4), torch.arange(8) % 3))
    model(torch.randn(5, 4)).sum().backward()
    with pytest.raises(ConfigError, match=r"call guard.observe\(batch\) before every"):
        optimizer.step()
