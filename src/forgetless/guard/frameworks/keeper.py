"""A guard for frameworks that own the loop, the optimizer and the checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, final

import torch
from torch import Tensor, nn

from forgetless.guard import Guard
from forgetless.guard.arguments import Projected, unwrapped
from forgetless.guard.batches.outputs import Named, Output
from forgetless.guard.batches.samples import Unpack as UnpackBatch
from forgetless.guard.parameters import Params
from forgetless.methods import Method
from forgetless.subspace import Storage
from forgetless.support.errors import ConfigError


class GuardOptions(TypedDict, total=False):
    """The keyword arguments of `Guard`, which says what they mean."""

    params: Params
    exclude: Sequence[str]
    project: Projected | None
    output: Named | Output | None
    loss: Output | None
    unpack: UnpackBatch | None
    storage: str | Storage | None
    budget: str | int | None
    max_rank: int | None
    seed: int


@final
class Keeper:
    """Makes a guard once a framework shows its optimizer, and carries it from task to task.

    Arguments:
        method: as `Guard` takes it.
        options: keyword arguments of `Guard`.
    """

    def __init__(self, method: Method[Any], options: GuardOptions) -> None:
        # A misspelt option should not wait for the training to begin.
        unknown = sorted(options.keys() - GuardOptions.__annotations__.keys())
        if unknown:
            raise TypeError(f"a guard has no option {', '.join(unknown)}")
        self.method = method
        self.options = options
        self._guard: Guard | None = None
        self._protected: dict[str, Tensor] = {}
        self._device: torch.device | None = None
        self._waiting: Mapping[str, Tensor] = {}  # loaded before there was a model

    @property
    def guard(self) -> Guard:
        """The guard."""
        if self._guard is None:
            raise ConfigError("there is no guard yet: it is made when training begins")
        return self._guard

    def watch(self, model: nn.Module, optimizer: Any, defaults: GuardOptions | None = None) -> None:
        """Watch over an optimizer's steps from now on, with all that is remembered.

        Arguments:
            model: the model, the same as before or another of the same shape.
            optimizer: its optimizer, new or not.
            defaults: options that hold where the user gave none.
        """
        parameters = dict(unwrapped(model).named_parameters())
        same = all(parameters.get(name) is tensor for name, tensor in self._protected.items())
        if self._guard is not None and same:
            self._guard.attach(optimizer)
            self._follow_the_model()
            return
        remembered = self.state_dict()
        if self._guard is not None:
            self._guard.remove()
        options: GuardOptions = {**(defaults or {}), **self.options}
        guard = Guard(model, optimizer, self.method, **options)
        if remembered:
            guard.load_state_dict(remembered)
        self._guard, self._waiting = guard, {}
        self._protected = {name: parameters[name] for name in guard.names}
        self._device = parameters[guard.names[0]].device

    def end_task(self, loader: Any) -> None:
        """Remember the task that was just learned."""
        self._follow_the_model()
        self.guard.end_task(loader)

    def state_dict(self) -> dict[str, Tensor]:
        """All that is remembered, empty before there was a guard."""
        return dict(self._waiting) if self._guard is None else self._guard.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave, as soon as there is a guard."""
        if self._guard is None:
            self._waiting = state_dict
        elif state_dict:
            self._guard.load_state_dict(state_dict)

    def _follow_the_model(self) -> None:
        """Bring memory to where the model is: frameworks move it before and after training."""
        device = self._protected[self.guard.names[0]].device
        if device != self._device:
            self.guard.load_state_dict(self.guard.state_dict())
            self._device = device
