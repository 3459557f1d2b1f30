"""A method's effect on steps of SGD after some tasks of a run, for forecasts."""

from collections.abc import Callable
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
    device = device or torch.device("cpu")
    heads = rebuilt.heads or None
    learner = make_learner(
        rebuilt.tasks, method, rebuilt.model, (seed,), rebuilt.training, heads, device
    )
    network, view = learner.network, learner.view
    for task in range(learned):
        network.load_state_dict(0, trace.weights(seed, task))
        view.task = task
        split = rebuilt.tasks.task(task, (seed,)).train
        learner.consolidate(split.to(device, network.theta.dtype), task)
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
