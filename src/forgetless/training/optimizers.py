"""Optimizers other than plain SGD, learning-rate schedules, and what a checkpoint holds of both.

A method that acts on the gradient hands the optimizer g̃ in place of the gradient. The update of an
optimizer under a method that acts on updates is projected, momentum and all:

    Δ = θ − optimizer(θ, g),   θ ← θ − Δ̃.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from forgetless.support.plugins import load_object
from forgetless.support.validation import ConfigError, require
from forgetless.training.network import Network
from forgetless.training.settings import OPTIMIZERS, WITH_MOMENTUM, Training


@final
class TorchOptimizer:
    """A torch optimizer on a network's weights, new for each task.

    By name it works on the stacked weights of all seeds. A function gets the parameters of one
    seed, each in its own shape, so that it may be of any kind.

    Arguments:
        training: its name or the function that makes it, and its settings.
        network: whose weights it changes, in place.
    """

    def __init__(self, training: Training, network: Network) -> None:
        self._theta, self._size = network.theta, network.protected_size
        made = training.optimizer
        if isinstance(made, str) and made in OPTIMIZERS:
            ends = [self._size, network.theta.shape[1]]
            starts = [0, self._size]
            views = [network.theta[:, a:b] for a, b in zip(starts, ends, strict=True) if a < b]
            self._slots = [
                (nn.Parameter(view), slice(a, b))
                for view, a, b in zip(views, starts, ends, strict=False)
            ]
            options: dict[str, Any] = {"lr": training.lr, "weight_decay": training.weight_decay}
            if made in WITH_MOMENTUM:
                options["momentum"] = training.momentum
            self.optimizer = getattr(torch.optim, OPTIMIZERS[made])(self._parameters, **options)
        else:
            make = load_object(made, "optimizer") if isinstance(made, str) else made
            sizes = [shape.numel() for shape in network.shapes.values()]
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            self._slots = [
                (nn.Parameter(network.theta[0, a : a + n].view(shape)), slice(a, a + n))
                for a, n, shape in zip(starts, sizes, network.shapes.values(), strict=True)
            ]
            self.optimizer = _optimizer_from(make, self._parameters)
        self._first_rates = [group["lr"] for group in self.optimizer.param_groups]

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter, _ in self._slots]

    def set_factor(self, factor: float) -> float:
        """Scale the learning rates; returns that of the first group."""
        for group, first in zip(self.optimizer.param_groups, self._first_rates, strict=True):
            group["lr"] = factor * first
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, g: Tensor, *, free: bool) -> None:
        """Change the weights by a gradient (S, p), those of heads only if they are `free`."""
        for parameter, columns in self._slots:
            trained = free or columns.start < self._size
            parameter.grad = g[:, columns].reshape(parameter.shape) if trained else None
        self.optimizer.step()

    def update(self, g: Tensor, *, free: bool) -> Tensor:
        """Δ for a gradient (S, p), which `step` would take away; the weights stay as they are."""
        before = self._theta.clone()
        self.step(g, free=free)
        taken = before - self._theta
        self._theta.copy_(before)
        return taken

    def tensors(self) -> dict[str, Tensor]:
        """The state of the optimizer, by parameter and name."""
        states = self.optimizer.state_dict()["state"]
        found = {}
        for number, state in states.items():
            for name, value in state.items():
                if not isinstance(value, Tensor | int | float):
                    kind = type(self.optimizer).__name__
                    raise ConfigError(
                        f"the {name} of {kind} is a {type(value).__name__}, which checkpoints "
                        "cannot hold; checkpoint_every=0 trains without them"
                    )
                found[f"{number}.{name}"] = torch.as_tensor(value)
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the state that `tensors` returned."""
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            number, name = key.split(".", 1)
            state.setdefault(int(number), {})[name] = value.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _optimizer_from(make: Any, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that a user's function makes of the parameters."""
    try:
        made: torch.optim.Optimizer = make(list(parameters))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer cannot be made of the parameters: {error}") from error
    fits = isinstance(made, torch.optim.Optimizer)
    require(fits, "optimizer", made, "a function of parameters that returns a torch optimizer")
    accepted = "one that takes a step without a closure"
    require(not isinstance(made, torch.optim.LBFGS), "optimizer", "LBFGS", accepted)
    return made
