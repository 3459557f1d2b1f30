"""Four methods from outside the package, each against its formula, wherever a method can run."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, softmax

from forgetless import Training, fit
from forgetless.support.streams import random_subset, stream
from forgetless.training.models import MLP
from tests.methods.formula import (
    BATCH,
    EPOCHS,
    LR,
    OPTIMIZERS,
    SEED,
    Plain,
    assert_weights,
    by_formula,
    flat,
    gradient,
    guarded,
)

FILE = Path(__file__).parents[2] / "examples" / "own_methods.py"


def own_methods():
    spec = importlib.util.spec_from_file_location("own_methods", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_methods"] = module
    spec.loader.exec_module(module)
    return module


own = own_methods()
METHODS = {
    "owm": own.OWM(alpha=30.0, samples=1000),
    "der++": own.DERPP(memory=20, batch_size=8, alpha=0.3, beta=0.7),
    "lwf": own.LwF(strength=0.8, temperature=2.0),
    "si": own.SI(strength=0.5, damping=0.01),
}


class PlainSI(Plain):
    def begin(self, model):
        self.anchor = flat(model.parameters()).detach().clone()
        self.big = torch.zeros_like(self.anchor)
        self.small = torch.zeros_like(self.anchor)

    def step(self, model, x, y, g):
        theta = flat(model.parameters()).detach()
        return g + 0.5 * 2 * self.big * (theta - self.anchor)

    def after(self, model, before, g):
        self.small += -g * (flat(model.parameters()).detach() - before)

    def end(self, model, x, y):
        theta = flat(model.parameters()).detach().clone()
        self.big += self.small.clamp(min=0) / ((theta - self.anchor) ** 2 + 0.01)
        self.anchor, self.small = theta, torch.zeros_like(theta)


class PlainLwF(Plain):
    old = None

    def step(self, model, x, y, g):
        if self.old is None:
            return g
        with torch.no_grad():
            target = softmax(self.old(x) / 2.0, 1)
        now = softmax(model(x) / 2.0, 1)
        divergence = (target * (target.log() - now.log())).sum(1).mean()
        return g + 0.8 * gradient(model, 4.0 * divergence)

    def end(self, model, x, y):
        self.old = MLP(64, 100, 10).double()
        self.old.load_state_dict(model.state_dict())


class PlainDERPP(Plain):
    def begin(self, model):
        self.held, self.seen = [], 0
        self.random = stream(SEED, "memory batches")

    def chosen(self):
        held = self.held
        if len(held) > 8:
            held = [held[i] for i in random_subset(8, len(held), self.random).tolist()]
        return [torch.stack(rows) for rows in zip(*held, strict=True)]

    def step(self, model, x, y, g):
        if self.held:
            inputs, _, logits = self.chosen()
            g = g + 0.3 * gradient(model, (model(inputs) - logits).pow(2).mean())
            inputs, labels, _ = self.chosen()
            g = g + 0.7 * gradient(model, cross_entropy(model(inputs), labels))
        numbers = torch.rand(len(x), dtype=torch.float64, generator=self.random)
        for row in zip(x, y, model(x).detach(), strict=True):
            number = numbers[0]
            numbers, self.seen = numbers[1:], self.seen + 1
            place = int(number * self.seen)
            if len(self.held) < 20:
                self.held.append(row)
            elif place < 20:
                self.held[place] = row
        return g


class PlainOWM(Plain):
    def begin(self, model):
        self.inputs = {}

    def step(self, model, x, y, g):
        parts, start = [], 0
        for name, p in model.named_parameters():
            part = g[start : start + p.numel()].view_as(p)
            start += p.numel()
            if name in self.inputs:
                rows = torch.cat(self.inputs[name])
                moment = rows.T @ rows + 30 * torch.eye(rows.shape[1]).double()
                part = torch.linalg.solve(moment, 30 * part.T).T
            parts.append(part)
        return flat(parts)

    def end(self, model, x, y):
        inputs = {}
        hooks = [
            layer.register_forward_hook(
                lambda _, args, __, name=name: inputs.update({f"{name}.weight": args[0]})
            )
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear)
        ]
        with torch.no_grad():
            model(x)
        for hook in hooks:
            hook.remove()
        for name, a in inputs.items():
            self.inputs.setdefault(name, []).append(a)


PLAIN = {"owm": PlainOWM, "der++": PlainDERPP, "lwf": PlainLwF, "si": PlainSI}
every_own_method = pytest.mark.parametrize("name", METHODS)


def formula(scenario, name, optimizer, **options):
    projects = METHODS[name].acts_on == "update"
    return by_formula(scenario, PLAIN[name](), OPTIMIZERS[optimizer], projects=projects, **options)


@every_own_method
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_a_guard_it_does_what_its_formula_says(name, optimizer, digits):
    found = guarded(digits, METHODS[name], OPTIMIZERS[optimizer])
    assert_weights(found, formula(digits, name, optimizer))


@every_own_method
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("sgd", {"lr": LR}),
        ("adamw", {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1}),
        ("adamw", {"optimizer": OPTIMIZERS["adamw"]}),
    ],
    ids=["sgd", "adamw", "a function"],
)
def test_in_fit_it_does_what_its_formula_says(name, optimizer, settings, digits):
    training = Training(epochs=EPOCHS, batch_size=BATCH, dtype="float64", **settings)
    trace = fit(digits, METHODS[name], seeds=[SEED], training=training)
    assert_weights(trace.weights(SEED, 2), formula(digits, name, optimizer, anew=True))


@every_own_method
def test_it_does_something(name, digits):
    """Or else the formulas would agree for nothing."""
    plain, other = (formula(digits, n, "sgd") for n in ("lwf" if name == "si" else "si", name))
    assert any(not torch.allclose(plain[k], other[k], atol=1e-4) for k in plain)


@every_own_method
def test_seeds_together_do_not_know_of_each_other(name, digits):
    training = Training(lr=LR, epochs=1, batch_size=BATCH, dtype="float64")
    alone = fit(digits, METHODS[name], seeds=[4], training=training)
    grouped = Training(lr=LR, epochs=1, batch_size=BATCH, dtype="float64", seeds_together=3)
    several = fit(digits, METHODS[name], seeds=[1, 4, 0], training=grouped)
    assert_weights(several.weights(4, 2), alone.weights(4, 2))
