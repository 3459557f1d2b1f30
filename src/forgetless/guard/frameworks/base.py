"""A guard for frameworks that own the loop, the optimizer and the checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from torch import Tensor, nn

from forgetless.guard.batches.outputs import Named, Output
from forgetless.guard.batches.samples import Unpack
from forgetless.guard.guard import Guard, unwrapped
from forgetless.guard.parameters import Params
from forgetless.guard.steps import Projected
from forgetless.methods import Method
from forgetless.subspace import Storage
from forgetless.support.errors import ConfigError


class GuardOptions(TypedDict, total=False):
    """The keyword arguments of `Guard`, which explains them."""

    params: Params
    exclude: str | Sequence[str]
    project: Projected | None
    output: Named | Output | None
    loss: Output | None
    unpack: Unpack | None
    storage: str | Storage | None
    budget: str | int | None
    max_rank: int | None
    drift_samples: int
    seed: int


class GuardCarrier:
    """A callback that creates a guard for the framework's optimizer and carries it through tasks.

    Arguments:
        method: as for `Guard`.
        options: keyword arguments of `Guard`.
    """

    def __init__(self, method: Method[Any], options: GuardOptions) -> None:
        # A misspelt option should not wait for the training to begin.
        unknown = sorted(options.keys() - GuardOptions.__annotations__.keys())
        if unknown:
            raise TypeError(f"a guard has no option {', '.join(unknown)}")
        self._method = method
        self._options = options
        self._guard: Guard | None = None
        self._protected: dict[str, Tensor] = {}
        self._loaded: Mapping[str, Tensor] = {}  # a state for the guard to come

    @property
    def guard(self) -> Guard:
        """The guard, once training has begun."""
        if self._guard is None:
            raise ConfigError("there is no guard yet: it is made when training begins")
        return self._guard

    def end_task(self, loader: Any) -> None:
        """Store the task that was just learned, on data that `Guard.end_task` takes."""
        self.guard.end_task(loader)

    def state_dict(self) -> dict[str, Tensor]:
        """All that is stored; empty before training."""
        return dict(self._loaded) if self._guard is None else self._guard.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`, at the latest when training begins."""
        if self._guard is None:
            self._loaded = state_dict
        elif state_dict:
            self._guard.load_state_dict(state_dict)

    def _attach(
        self, model: nn.Module, optimizer: Any, defaults: GuardOptions | None = None
    ) -> None:
        """Guard an optimizer's steps from now on, with all tasks stored so far.

        Arguments:
            model: the model, the same as before or another of the same shape.
            optimizer: its optimizer, new or not.
            defaults: options that the user's override.
        """
        parameters = dict(unwrapped(model).named_parameters())
        same = all(parameters.get(name) is tensor for name, tensor in self._protected.items())
        if self._guard is not None and same:
            self._guard.attach(optimizer)
            return
        stored = self.state_dict()
        if self._guard is not None:
            self._guard.remove()
        options: GuardOptions = {**(defaults or {}), **self._options}
        guard = Guard(model, optimizer, self._method, **options)
        if stored:
            guard.load_state_dict(stored)
        self._guard, self._loaded = guard, {}
        self._protected = {name: parameters[name] for name in guard.names}


def require_one_process(processes: int, callback: str) -> None:
    """Reject several processes, where each would store its own samples."""
    if processes > 1:
        raise ConfigError(
            "each process would store other samples: with several processes use "
            f"{callback}(…, end_task=False) and call end_task with the same data in each"
        )
