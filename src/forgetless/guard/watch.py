"""Noticing what is trained and not protected: changes outside of guarded steps, and parameters."""

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from forgetless.guard.parameters import Parameters, present, unprotected, untrained_versions

# In-place changes of a parameter between two guarded steps of a task that may be weights that were
# loaded, or averages swapped in and out; a training has many.
LOADS = 4
_CHECK_EVERY = 50  # steps between looks at the values, for changes that raise no version


@final
class Uncompiled:
    """A function, excluded from compilation where the training step is compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._uncompiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        if "torch._dynamo" not in sys.modules:  # it takes seconds to import
            return self._function(*args)
        if self._uncompiled is None:
            self._uncompiled = torch.compiler.disable(self._function)
        return self._uncompiled(*args)


@final
class Watch:
    """The protected parameters as the guard last left them, and what has changed them since.

    An in-place change raises a tensor's version, except where it is made through `.data` or by a
    fused optimizer; a version also rises where the values end up the same, as when an average of
    the weights is swapped in and out. So versions say when to look and how often something was
    changed, and the parameters' lengths whether anything is different. Lengths are compared, which
    makes a GPU wait, only if versions have changed, at steps 1, 2, 4, 8, … and at every 50th. The
    steps of every other optimizer are seen at once.

    Arguments:
        parameters: the protected parameters.
        is_guarded: whether an optimizer's present step is changed by a guard.
        look: called with another optimizer after some of its steps, to see what it trains.
        warn: takes a warning.
    """

    def __init__(
        self,
        parameters: Parameters,
        is_guarded: Callable[[Optimizer], bool],
        look: Callable[[Optimizer], None],
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self._parameters = parameters
        self._is_guarded = is_guarded
        self._look = look
        self._others = 0  # steps of optimizers that are not guarded
        self._versions: list[int] | None = None  # None while nothing is watched
        self._lengths: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._tasks = 0
        self._steps = 0  # guarded ones, of the present task
        self._may_load = False
        self._has_warned = False

    def begin(self, tasks: int, *, may_load: bool = False) -> None:
        """Watch from now on, at the start of a task.

        Arguments:
            tasks: how many are stored.
            may_load: whether the weights may still be loaded, as when training resumes.
        """
        self._tasks, self._steps, self._may_load = tasks, 0, may_load
        self._mark()
        _see_all_optimizers()
        _watches.add(self)

    def end(self) -> None:
        """Watch no more."""
        self._versions = self._lengths = None

    def after_step(self, *, is_own: bool) -> None:
        """Remember the parameters that a guarded step has left.

        Arguments:
            is_own: whether it is counted; not where another guard changed the same step.
        """
        if self._versions is not None:
            self._steps += is_own
            self._may_load = False
            self._mark()

    def before_step(self) -> None:
        """Warn, once, if the parameters are others than after the step before."""
        if self._versions is None or self._has_warned:
            return
        n, changes = self._steps, self._changes()
        by_turns = n & (n - 1) == 0 or n % _CHECK_EVERY == 0
        if not changes and not by_turns:
            return
        if not (self._may_load and changes <= LOADS):
            self.warn_if_different()

    def between_steps(self) -> None:
        """Warn, once, if something else trains the parameters; loaded weights are no reason."""
        if self._versions is None or self._has_warned:
            return
        changes = self._changes()
        # One change of all parameters is what loading them makes. None with other values is a
        # fused optimizer, or an edit of `.data`, which a few steps cannot be told from.
        most = LOADS if self._steps or self._may_load else 1
        is_load = 0 <= changes <= most if self._steps else 1 <= changes <= most
        if not is_load:
            self.warn_if_different()

    def notes_bypass(self, optimizer: Optimizer) -> bool:
        """Note a step of another optimizer; whether it changed the parameters and nobody was told.

        After steps 1, 2, 4, 8, … of those that leave them alone, `look` is called.
        """
        if self._versions is None or self._is_guarded(optimizer):
            return False
        if self._has_warned or not self._parameters.are_in(optimizer):
            self._others += 1
            if self._others & (self._others - 1) == 0:
                self._look(optimizer)
            return False
        return self._different() is not None

    def _mark(self) -> None:
        self._versions = self._parameters.versions()
        self._lengths = self._parameters.lengths()
        self._dtype = self._parameters.tensors[0].dtype

    def _changes(self) -> int:
        """The in-place changes of the parameter that has most."""
        before = self._versions or []
        pairs = zip(self._parameters.versions(), before, strict=True)
        return max((now - then for now, then in pairs), default=0)

    def warn_if_different(self) -> None:
        """Warn, once, if the parameters are others than as they were left."""
        name = self._different()
        if name is None:
            return
        self._has_warned = True
        stored = "1 task is" if self._tasks == 1 else f"{self._tasks} tasks are"
        self._warn(
            f"{name} was changed by something else than the guarded optimizer's steps while "
            f"{stored} stored, and what it changed is not protected: give the guard every "
            "optimizer that trains the model, by guard.attach(optimizer) or a list of them, and "
            "load or edit weights only before end_task"
        )

    def _different(self) -> str | None:
        """The first parameter whose length is another one; None if there is none or no telling."""
        before, first = self._lengths, self._parameters.tensors[0]
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        # A model in another place or precision has rounded weights.
        if (
            before is None
            or before.is_meta
            or (before.device, self._dtype) != (first.device, first.dtype)
        ):
            return None
        now = self._parameters.lengths()
        # Another number of threads sums in another order.
        rounding = 8 * torch.finfo(now.dtype).eps
        same = torch.isclose(now, before, rtol=rounding, atol=0.0, equal_nan=True)
        names = zip(self._parameters.names, same.tolist(), strict=True)
        return next((name for name, alike in names if not alike), None)


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


@cache
def _see_all_optimizers() -> None:
    """Look after every step of every optimizer, from now on."""
    register_optimizer_step_post_hook(Uncompiled(_after_any_step))


def _after_any_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for reference in [*map(weakref.ref, _watches)]:
        if _is_bypassed(reference, optimizer):
            gc.collect()  # a guard that was dropped has nothing to say
            watch = reference()
            if watch is not None:
                watch.warn_if_different()


def _is_bypassed(reference: weakref.ref[Watch], optimizer: Optimizer) -> bool:
    watch = reference()
    return watch is not None and watch.notes_bypass(optimizer)


@final
class Coverage:
    """Which of the parameters that are trained should be protected, and are not.

    Arguments:
        chosen: the parameters to protect; None for all that are trained.
        exclude: names, or beginnings of names, that are excluded.
        warn: takes a warning.
    """

    def __init__(
        self, chosen: Sequence[str] | None, exclude: Sequence[str], warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self.chosen = chosen
        self._exclude = exclude
        self._told: set[str] = set()
        self._groups = 0
        self._others: dict[str, int] = {}

    def begin(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Remember what the optimizers do not train, at the guard's beginning."""
        if self.chosen is None:
            self._others = untrained_versions(module, optimizers, self._exclude)

    def excluded(self, module: nn.Module) -> tuple[str, ...]:
        """The excluded names that a changed model still has."""
        return present(module, self._exclude)

    def has_new_groups(self, groups: int) -> bool:
        """Whether the optimizers have other groups than when this was last asked."""
        before, self._groups = self._groups, groups
        return before != groups

    def unprotected(
        self, module: nn.Module, optimizers: Sequence[Optimizer], names: Sequence[str]
    ) -> list[str]:
        """The parameters that these optimizers train, and that should be protected, but are not.

        Arguments:
            module: the model.
            optimizers: its optimizers.
            names: the protected parameters.
        """
        return unprotected(module, optimizers, {*names}, self.chosen, self.excluded(module))

    def warn(
        self, module: nn.Module, optimizers: Sequence[Optimizer], names: Sequence[str]
    ) -> None:
        """Warn, once for each, of a parameter that should be protected, but is not.

        It was not trained when the guard was made, or is by an optimizer that the guard lacks.
        """
        new = [n for n in self.unprotected(module, optimizers, names) if n not in self._told]
        if new:
            self._told |= {*new}
            self._warn(
                f"{new[0]} is trained now and was not when the guard was made, so it is not "
                "protected: call guard.adopt(model, optimizer), or choose by params= what is "
                "protected if that is meant"
            )
        versions = untrained_versions(module, optimizers, self.excluded(module))
        trained = [n for n, v in versions.items() if v > self._others.get(n, v) + LOADS]
        moved = [name for name in trained if name not in {*names, *self._told}]
        if moved:
            self._told |= {*moved}
            self._warn(
                f"{moved[0]} is trained by an optimizer that the guard was not given, so it is not "
                "protected: make the guard with all of them, Guard(model, [a, b], …), or choose by "
                "params= what is protected if that is meant"
            )

    def warn_of_replaced(self, name: str | None) -> None:
        """Warn, once, that a protected parameter is no longer the model's and others are trained.

        Arguments:
            name: the parameter; None if there is none.
        """
        if name is not None and name not in self._told:
            self._told.add(name)
            self._warn(
                f"{name}, which the guard protects, is no longer a parameter of the model: it was "
                "replaced, or an adapter was merged. Others are trained now, and the stored tasks "
                "are not protected in them: call guard.adopt(model, optimizer) for a layer that "
                "got more rows; otherwise make a new guard and store the tasks again"
            )

    def warn_of_blind(self, names: Sequence[str]) -> None:
        """Warn, once for each, of parameters whose gradient was zero when the task was stored."""
        new = [name for name in names if name not in self._told]
        self._told |= {*new}
        if new:
            others = f" (and of {len(new) - 1} more)" if new[1:] else ""
            self._warn(
                f"the gradient of {new[0]}{others} is zero on all samples of the task, so it is "
                "not protected, though it may matter later. The first factor of a fresh LoRA "
                "adapter is so while its second factor is zero: take KronEWC or KronOGD, which "
                "protect the adapters of peft by their inputs, call guard.refresh(loader) after "
                "some steps, or train the adapter before end_task. In other layers, see whether "
                "training has diverged or units have died"
            )
