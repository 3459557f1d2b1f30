"""A method's formula written once more with plain autograd on a module, and the same in a guard."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from forgetless import Guard, Method, Scenario
from forgetless.support.streams import global_stream, stream
from forgetless.training.models import MLP

SEED, LR, EPOCHS, BATCH = 3, 0.05, 2, 16
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=LR),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
}


class Plain:
    """What a paper prints; by itself fine-tuning.

    Attributes:
        active: the outputs that compete in the present task, (C,) of bool.
    """

    active: Tensor

    def begin(self, model: nn.Module) -> None:
        """Before the first step."""

    def step(self, model: nn.Module, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
        """The gradient in place of that of the batch's loss; of a projection, the step."""
        return g

    def after(self, model: nn.Module, before: Tensor, g: Tensor) -> None:
        """After a step."""

    def end(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """After a task."""

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The cross-entropy among the outputs that compete."""
        return cross_entropy(model(x).masked_fill(~self.active, -torch.inf), y)


def flat(tensors: Any) -> Tensor:
    """Some tensors as one vector."""
    return torch.cat([t.flatten() for t in tensors])


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """The gradient of a loss in all of a model's parameters, as one vector."""
    return flat(torch.autograd.grad(loss, list(model.parameters())))


def parts_of(vector: Tensor, model: nn.Module) -> list[Tensor]:
    """A vector's part for each parameter, in its shape."""
    sizes = [p.numel() for p in model.parameters()]
    parts = zip(vector.split(sizes), model.parameters(), strict=True)
    return [part.view_as(p) for part, p in parts]


def fresh(outputs: int = 10) -> nn.Module:
    """The network that `fit` starts from."""
    with global_stream(SEED, "initial weights"):
        return MLP(64, 100, outputs).double()


def batches(scenario: Scenario) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
    """Each task's data and the samples of each step, in the order of `fit`."""
    order = stream(SEED, "batches")
    for t in range(scenario.n_tasks):
        split = scenario.task(t, [SEED]).train
        inputs, labels = split.take(torch.arange(len(split)).unsqueeze(0))
        x, y = inputs[0].double(), labels[0]
        epochs = [torch.randperm(len(x), generator=order).split(BATCH) for _ in range(EPOCHS)]
        yield x, y, [index for epoch in epochs for index in epoch]


def by_formula(
    scenario: Scenario,
    rule: Plain,
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    anew: bool = False,
    projects: bool = False,
) -> dict[str, Tensor]:
    """Weights after the tasks by the formula.

    Arguments:
        anew: start the optimizer anew with each task, as `fit` does.
        projects: let the formula change the optimizer's update in place of the gradient.
    """
    model = fresh(scenario.n_outputs)
    stepper = optimizer(model.parameters())
    rule.begin(model)
    for t, (x, y, steps) in enumerate(batches(scenario)):
        rule.active = torch.zeros(scenario.n_outputs, dtype=torch.bool)
        rule.active[scenario.competing(t)] = True
        if anew:
            stepper.state.clear()
        for index in steps:
            before = flat(model.parameters()).detach()
            g = gradient(model, rule.loss(model, x[index], y[index]))
            given = g if projects else rule.step(model, x[index], y[index], g)
            for p, part in zip(model.parameters(), parts_of(given, model), strict=True):
                p.grad = part.clone()
            stepper.step()
            if projects:
                moved = before - flat(model.parameters()).detach()
                after = before - rule.step(model, x[index], y[index], moved)
                with torch.no_grad():
                    for p, part in zip(model.parameters(), parts_of(after, model), strict=True):
                        p.copy_(part)
            rule.after(model, before, g)
        rule.end(model, x, y)
    return model.state_dict()


def guarded(
    scenario: Scenario, method: Method, optimizer: Callable[..., torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Weights after the tasks in a loop of one's own; all outputs compete."""
    model = fresh(scenario.n_outputs)
    stepper = optimizer(model.parameters())
    guard = Guard(model, stepper, method, seed=SEED)
    for x, y, steps in batches(scenario):
        for index in steps:
            stepper.zero_grad()
            cross_entropy(model(x[index]), y[index]).backward()
            guard.observe((x[index], y[index]))
            stepper.step()
        guard.end_task((x, y))
    return model.state_dict()


def assert_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """That both are the same up to rounding."""
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-8, atol=1e-10)
