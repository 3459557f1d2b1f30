"""Noticing that protected parameters changed outside of the guarded steps."""

from typing import final

import torch
from torch import Tensor

from forgetless.guard.parameters import Parameters
from forgetless.support.validation import warn_caller

# In-place changes of a parameter between two guarded steps of a task that may be weights that were
# loaded, or averages swapped in and out; a training has many.
LOADS = 4
_CHECK_EVERY = 50  # steps between looks at the values, for changes that raise no version


@final
class Watch:
    """The protected parameters as the guard last left them, and what has changed them since.

    An in-place change raises a tensor's version, except where it is made through `.data` or by a
    fused optimizer; a version also rises where the values end up the same, as when an average of
    the weights is swapped in and out. So versions say when to look and how often something was
    changed, and the parameters' lengths whether anything is different. Lengths are compared, which
    makes a GPU wait, only if versions have changed, at steps 1, 2, 4, 8, … and at every 50th.

    Arguments:
        parameters: the protected parameters.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
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
            self._warn_if_different()

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
            self._warn_if_different()

    def _mark(self) -> None:
        self._versions = self._parameters.versions()
        self._lengths = self._parameters.lengths()
        self._dtype = self._parameters.tensors[0].dtype

    def _changes(self) -> int:
        """The in-place changes of the parameter that has most."""
        before = self._versions or []
        pairs = zip(self._parameters.versions(), before, strict=True)
        return max((now - then for now, then in pairs), default=0)

    def _warn_if_different(self) -> None:
        name = self._different()
        if name is None:
            return
        self._has_warned = True
        stored = "1 task is" if self._tasks == 1 else f"{self._tasks} tasks are"
        warn_caller(
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
