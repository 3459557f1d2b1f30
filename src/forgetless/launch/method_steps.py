"""A method's effect on steps of SGD after some tasks of a run, for forecasts and analyses."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from forgetless.launch.rebuild import Rebuilt
from forgetless.methods import Method
from forgetless.methods.state import take_step
from forgetless.support.errors import ConfigError
from forgetless.support.layout import Layout
from forgetless.trace import Trace
from forgetless.training.build import make_learner
from forgetless.training.learner import Learner


def method_step(
    rebuilt: Rebuilt,
    method: Method[Any],
    trace: Trace,
    seed: int,
    learned: int,
    device: torch.device | None = None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """What a method makes of a step of SGD, once it has consolidated the first tasks of a run.

    The result takes a step and the weights before it, (p,) each, over all trained parameters in the
    model's order, and returns the step that is taken. It keeps the method's state from call to
    call.

    Arguments:
        rebuilt: what the run was made with.
        method: any method that does not need the batch of a step.
        trace: of the run, with the weights after each of those tasks.
        seed: of the trace.
        learned: number of tasks.
    """
    if method.needs_batch:
        raise ConfigError(
            f"{method.name} needs the batch of every step, which a forecast does not have"
        )
    learner = _learner_of(rebuilt, method, seed, device or torch.device("cpu"))
    network, view = learner.network, learner.view
    for _ in _consolidated(learner, rebuilt, trace, seed, learned):
        pass
    view.task = learned
    network.module.eval()
    state, size = learner.state, network.protected_size
    inside = Layout({name: tuple(shape) for name, shape in network.shapes.items()})
    in_order = [n for n, _ in network.module.named_parameters() if n in network.shapes]
    outside = Layout({name: inside.shapes[name] for name in in_order})

    def taken(step: Tensor, theta: Tensor) -> Tensor:
        nonlocal state
        network.theta.copy_(inside.join(outside.split(theta.unsqueeze(0))))
        g = inside.join(outside.split(step.unsqueeze(0))).to(network.theta)
        protected, state = take_step(method, g[:, :size], state, view)
        free = g[:, size:] if method.trains_heads(state) else torch.zeros_like(g[:, size:])
        found = outside.join(inside.split(torch.cat([protected, free], 1)))
        return found[0].to(step)

    return taken


def projections(
    rebuilt: Rebuilt,
    method: Method[Any],
    trace: Trace,
    seed: int,
    learned: int,
    names: Sequence[str],
) -> list[Callable[[Tensor], Tensor]]:
    """T of each task of a run, as it was when the task started: rows (n, p) → (n, p).

    Arguments:
        rebuilt, trace, seed: as for `method_step`.
        method: one with `keeps_directions`.
        learned: number of tasks.
        names: the parameters that it protects, in the order of the rows.
    """
    learner = _learner_of(rebuilt, method, seed, torch.device("cpu"))
    theta = learner.network.protected
    shapes = learner.network.shapes
    inside = Layout({name: tuple(shapes[name]) for name in learner.network.protected_names})
    outside = Layout({name: inside.shapes[name] for name in names})

    def without(directions: Any) -> Callable[[Tensor], Tensor]:
        def taken(rows: Tensor) -> Tensor:
            g = inside.join(outside.split(rows)).to(theta)
            left = torch.cat([directions.project_out(one) for one in g.split(1)])
            return outside.join(inside.split(left)).to(rows)

        return taken

    found = [without(learner.state)]
    found += map(without, _consolidated(learner, rebuilt, trace, seed, learned - 1))
    return found


def _learner_of(rebuilt: Rebuilt, method: Method[Any], seed: int, device: torch.device) -> Learner:
    """A learner with the settings of a run, before its first task."""
    heads = rebuilt.heads or None
    return make_learner(
        rebuilt.tasks, method, rebuilt.model, (seed,), rebuilt.training, heads, device
    )


def _consolidated(
    learner: Learner, rebuilt: Rebuilt, trace: Trace, seed: int, learned: int
) -> Iterator[Any]:
    """The method's state after each of the first tasks, at the weights that the run had then."""
    network = learner.network
    for task in range(learned):
        network.load_state_dict(0, trace.weights(seed, task))
        learner.view.task = task
        split = rebuilt.tasks.task(task, (seed,)).train
        learner.consolidate(split.to(network.theta.device, network.theta.dtype), task)
        yield learner.state
