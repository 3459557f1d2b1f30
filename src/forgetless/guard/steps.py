"""Changing the steps of optimizers: hooks before and after each of them."""

import atexit
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from forgetless.guard.batches.samples import StoredSamples
from forgetless.guard.model import GuardedModel, full_precision
from forgetless.guard.report import Removed
from forgetless.guard.view import GuardView
from forgetless.guard.watch import Uncompiled, Watch
from forgetless.methods import Method
from forgetless.methods.state import take_step
from forgetless.subspace import DENSE, Storage, Subspace
from forgetless.support.collectives import Ranks
from forgetless.support.cuda_graphs import GraphedFunction
from forgetless.support.progress import bar_on_terminal
from forgetless.support.validation import (
    ConfigError,
    ForgetlessWarning,
    TrainingError,
    require,
    warn_caller,
)

Projected = Literal["update", "gradient"]

_FULL = 0.95  # share of the new task's progress removed at which there is no room left to learn
_CHECK_EVERY = 50  # steps between checks of that share, which make a GPU wait
_WEIGH_EVERY = 10  # steps between those whose progress is looked at
_PATTERNS = 8  # choices of movable parameters whose restricted subspaces are cached


@final
class Hook:
    """An optimizer's hook, and what it changes the steps by."""

    def __init__(self, steps: "Steps", function: Callable[..., Any]) -> None:
        self.steps = steps
        self._function = Uncompiled(function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


@final
class Steps:
    """Lets a method change every step of one or several optimizers.

    Arguments:
        model: the model.
        method: the method.
        project: whether to change the optimizer's update or the gradient it is given.
        generator: of random memory batches.
        prepare: called before a step that the method changes, to make its first state or to move
            the state when the model was moved.
        check: called after each of these steps, such as for the drift of the outputs.
        look: called with another optimizer after some of its steps, which nothing changes.
        ranks: the processes that each hold a part of every parameter; None if all is here.
        progress: whether a bar on a terminal tells what the first step waits for.
        warn: takes a warning.
    """

    has_stored: ClassVar[bool] = False  # whether any task was, in this process

    def __init__(
        self,
        model: GuardedModel,
        method: Method[Any],
        project: Projected,
        generator: torch.Generator,
        prepare: Callable[[], None],
        check: Callable[[], None],
        look: Callable[[Optimizer], None],
        ranks: Ranks | None = None,
        progress: bool = False,
        warn: Callable[[str], None] = warn_caller,
    ) -> None:
        self._warn = warn
        self.model = model
        self.method = method
        self.project = project
        self.generator = generator
        self._prepare = prepare
        self._check_after = check
        self._ranks = ranks
        self._parameters = model.parameters
        self._handles: list[RemovableHandle] = []
        self.optimizers: tuple[Optimizer, ...] = ()
        self._stepping: tuple[Optimizer, ...] = ()  # the one that takes the present step
        self.watch = Watch(self._parameters, self._is_guarded, look, warn)
        self.batch: StoredSamples | None = None  # of the coming step
        self._has_begun = False
        self._has_projected = False
        self.progress = progress
        self._has_before = False  # whether the parameters were read before the present step
        self.has_warned_of_full = self._warned_of_infinite = False
        self.set_state(None, DENSE, 0, 0)

    def set_state(self, state: Any, storage: Storage, task: int, steps: int) -> None:
        """Change steps by this state from now on.

        Arguments:
            state: of the method.
            storage: of its directions.
            task: the task that is being learned, from 0.
            steps: taken so far.
        """
        self.state, self.storage, self.task, self.steps = state, storage, task, steps
        self._start = steps
        if task:
            Steps.has_stored = True
        self.is_active = self.method.protects and bool(
            task or not self.method.idle_before_first_task
        )
        self.place = self._parameters.place
        self._restricted: dict[tuple[int, ...], Any] = {}
        adds = self.method.acts_on == "gradient"
        self.removed = Removed(self._parameters.names, self._ranks, adds=adds)
        self.watch_from_now()
        self._read_all = GraphedFunction(self._read)
        self._correct_all = GraphedFunction(
            partial(self._correct, tuple(range(len(self.removed.names))))
        )

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Change the steps of these optimizers, and of no others."""
        self.check(optimizers)
        was_attached = self.is_attached
        self.watch.between_steps()
        self.detach()
        self.optimizers = tuple(optimizers)
        for optimizer in optimizers:
            self._handles += [
                optimizer.register_step_pre_hook(Hook(self, self._before_step)),
                optimizer.register_step_post_hook(Hook(self, self._after_step)),
            ]
        if not was_attached:
            self.watch_from_now()
        _attached.add(self)

    def remove(self) -> None:
        """Detach from the optimizers, and watch no more."""
        self.watch.between_steps()
        self.watch.end()
        self.detach()

    def detach(self) -> None:
        """Detach from the optimizers, to attach to others."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def is_attached(self) -> bool:
        """Whether any optimizer's steps are changed."""
        return bool(self._handles)

    @property
    def is_in_vain(self) -> bool:
        """Whether there were steps to guard and no task that they could have preserved."""
        idle = self.method.protects and self.method.idle_before_first_task
        return self.is_attached and bool(self.steps) and idle and not self.task

    @property
    def groups(self) -> int:
        """The number of the optimizers' parameter groups."""
        return sum(len(optimizer.param_groups) for optimizer in self.optimizers)

    def watch_from_now(self, *, may_load: bool = False) -> None:
        """Notice changes of the parameters, if there is something to lose.

        Arguments:
            may_load: whether the weights may still be loaded, as when training resumes.
        """
        if self._handles and self.task and self.method.protects:
            self.watch.begin(self.task, may_load=may_load)
        else:
            self.watch.end()

    def check(self, optimizers: Sequence[Optimizer], successor_of: "Steps | None" = None) -> None:
        """Reject optimizers whose steps this guard cannot change.

        Arguments:
            optimizers: the optimizers.
            successor_of: what changes their steps now, and will be removed.
        """
        mine = {id(t): n for n, t in zip(self._parameters.names, self._parameters.tensors)}
        trained = [
            {id(p) for group in optimizer.param_groups for p in group["params"]} & mine.keys()
            for optimizer in optimizers
        ]
        if not any(trained):
            raise ConfigError("the optimizer trains none of the protected parameters")
        if len(optimizers) > 1 and self.method.needs_batch:
            raise ConfigError(
                f"{self.method.name} uses the batch of every step, and several optimizers take "
                "several steps with it: it is for one optimizer"
            )
        twice = [n for i, n in mine.items() if sum(i in some for some in trained) > 1]
        if twice and self.project == "gradient":
            raise ConfigError(
                f"two optimizers train {twice[0]}, whose gradient {self.method.name} would change "
                "twice: give each optimizer its own parameters"
            )
        for other in (steps for optimizer in optimizers for steps in _guards_of(optimizer)):
            both = self.method.acts_on == other.method.acts_on == "update"
            common = [mine[id(t)] for t in other._parameters.tensors if id(t) in mine]
            if other not in (self, successor_of) and common and both:
                raise ConfigError(
                    f"another guard projects this optimizer's steps of {common[0]} already, and "
                    "of two projections only the last one holds; call its remove() first"
                )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.is_active and self._has_begun:
            return None
        self._has_begun = True
        self._prepare()  # also of a method that is idle: its first state is of these weights
        if not self.is_active:
            return None
        self._stepping = (optimizer,)
        self.watch.before_step()
        if self.project == "update":
            self._read_all(self._parameters.pointers(), self.place[0])
            self._has_before = True
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._change_gradients(optimizer)
            return None

        def changed() -> Any:
            loss = closure()  # makes the gradients, inside the step
            self._change_gradients(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], changed, *args[2:]), kwargs
        return args, {**kwargs, "closure": changed}

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        has_before, self._has_before = self._has_before, False
        movable = self._parameters.movable(optimizer) if has_before else ()
        if movable and not self._is_skipped(optimizer):
            if len(movable) == len(self._parameters.names) and self._is_recordable():
                self._correct_all(self._parameters.pointers(), self.place[0])
            else:
                self._correct(movable)
            self._weigh(optimizer)
            self._count_projection()
        self.steps += 1
        self.batch, self._stepping = None, ()
        for steps in _guards_of(optimizer):
            steps.watch.after_step(is_own=steps is self)
        if self.is_active:
            self._check_after()

    def view(self, theta: Tensor | None = None, movable: Tensor | None = None) -> GuardView:
        """The method's view at this step.

        Arguments:
            theta: the weights, (1, p); None for the present ones.
            movable: mask (p,) of the parameters that can move; None for all.
        """
        return GuardView(
            self.model,
            self.generator,
            self.storage,
            task=self.task,
            step=self.steps,
            optimizers=self._stepping or self.optimizers,
            theta=theta,
            movable=movable,
            batch=self.batch,
        )

    def _is_guarded(self, optimizer: Optimizer) -> bool:
        """Whether a guard changes the optimizer's steps, or it steps inside of one that does."""
        return bool(self._stepping) or any(True for _ in _guards_of(optimizer))

    def _is_recordable(self) -> bool:
        """Whether changing a step is the same GPU kernels every time, and nothing else."""
        method = self.method
        alone = self._ranks is None and self._parameters.slices is None
        near = self.storage.device in (None, self.place[0]) or not method.keeps_directions
        return alone and near and method.recordable and not method.needs_model

    def _is_skipped(self, optimizer: Optimizer) -> bool:
        """Whether a fused optimizer leaves out this step, whose gradient overflowed.

        A state that follows every step would keep the infinite numbers.
        """
        overflow = getattr(optimizer, "found_inf", None)
        return not self.method.recordable and overflow is not None and bool(overflow)

    def _read(self) -> None:
        """Copy the parameters before a step."""
        self._parameters.read(self._parameters.flat("before", self.place))

    def _correct(self, movable: tuple[int, ...]) -> None:
        """Undo the part of the step that the method removes."""
        flat = partial(self._parameters.flat, place=self.place)
        before, step, removed = flat("before"), flat("step"), flat("removed")
        self._parameters.difference(before, step)  # the optimizer's step, as it is subtracted
        changed = self._changed(step.vector, before.vector, movable)
        torch.sub(step.vector, changed, out=removed.vector)
        self._parameters.add(removed, movable)
        self.removed.add(step.parts, removed.parts)

    @property
    def _weighs(self) -> bool:
        """Whether to look at this step's progress."""
        return (self.steps - self._start) % _WEIGH_EVERY == 0

    def _weigh(self, optimizer: Optimizer) -> None:
        """Note now and then how much of the step's progress was removed."""
        if self._weighs:
            vectors = [self._parameters.flat(name, self.place) for name in ("step", "removed")]
            products = self._parameters.along_gradients(optimizer, *vectors)
            if products is not None:
                self.removed.weigh(*products)

    def _change_gradients(self, optimizer: Optimizer) -> None:
        movable = self._parameters.movable(optimizer)
        if not movable or self._is_skipped(optimizer):
            return
        scale = getattr(optimizer, "grad_scale", None)  # fused optimizers unscale on their own
        gradient = self._parameters.gradients()
        if scale is not None:
            gradient /= scale.to(gradient.device)
        # Methods descend, also where the optimizer ascends.
        upwards = self._parameters.maximized(optimizer)
        for columns in upwards:
            gradient[:, columns].neg_()
        changed = self._changed(gradient, self._parameters.read(), movable)
        projects = self.method.acts_on == "update"
        if self._weighs:
            g, removed = gradient[0], (gradient - changed)[0]
            self.removed.weigh(torch.dot(g, g), torch.dot(g if projects else removed, removed))
        if projects:
            parts = self._parameters.parts
            self.removed.add(parts(gradient), parts(gradient - changed))
            self._count_projection()
        if upwards:
            changed = changed.clone()
        for columns in upwards:
            changed[:, columns].neg_()
        if scale is not None:
            changed = changed * scale.to(changed.device)
        self._parameters.write_gradients(changed, movable)

    def _changed(self, g: Tensor, theta: Tensor, movable: tuple[int, ...]) -> Tensor:
        """The method's change of a step or gradient in which only some parameters can move."""
        state, mask = self.state, None
        if len(movable) < len(self._parameters.names):
            columns = [self._parameters.columns[i] for i in movable]
            mask = torch.zeros_like(g[0], dtype=torch.bool)
            for some in columns:
                mask[some] = True
            g = g * mask
            if self.method.keeps_directions:
                state = self._restrict(state, movable, columns)
        with torch.no_grad(), full_precision(g.device), self._watched():
            changed, after = take_step(self.method, g, state, self.view(theta, mask))
        self._check_finite(g, changed)
        if after is not state:
            if state is not self.state:
                raise ConfigError(
                    f"{self.method.name} changes its directions at a step, which a guard cannot "
                    "follow while only some of the parameters can move"
                )
            self.state = after
        return changed if mask is None else changed * mask

    def _watched(self) -> AbstractContextManager[None]:
        """A bar on a terminal if the first projection must be compiled."""
        if self._has_projected or not self.progress:
            return nullcontext()
        self._has_projected = True
        return bar_on_terminal("first guarded step", patience=0.0)

    def _check_finite(self, g: Tensor, changed: Tensor) -> None:
        """Raise if the method makes a step NaN or infinite, and warn once if the optimizer does.

        A GPU is asked only now and then, since it waits, and a sharded model not at all. What a
        loss scaler leaves out may be infinite.
        """
        skips = any(getattr(o, "found_inf", None) is not None for o in self._stepping)
        waits = g.device.type != "cpu" and (self.steps % _CHECK_EVERY > 0 or self._is_recordable())
        if skips or waits or self._ranks is not None or _is_finite(changed):
            return
        where = f"NaN or infinite in step {self.steps + 1}"
        if _is_finite(g):
            raise TrainingError(f"{self.method.name} makes a finite {self.project} {where}")
        if not self._warned_of_infinite:
            self._warned_of_infinite = True
            what = "loss's gradient" if self.project == "gradient" else "optimizer's update"
            remedy = "a smaller learning rate, or a GradScaler in half precision, may help"
            self._warn(f"the {what} is {where}; {remedy}")

    def _restrict(self, state: Subspace, movable: tuple[int, ...], columns: list[slice]) -> Any:
        """The subspace restricted to the movable parameters, cached for every choice of them."""
        if movable not in self._restricted:
            if len(self._restricted) == _PATTERNS:
                self._restricted.pop(next(iter(self._restricted)))
            self._restricted[movable] = state.restricted(columns)
        return self._restricted[movable]

    def _count_projection(self) -> None:
        self.removed.steps += 1
        if self.removed.steps % _CHECK_EVERY == 0:
            self.warn_if_full()

    def warn_if_full(self) -> None:
        """Warn, once, if nearly all that the steps would learn of the new task was removed.

        A step's length says nothing of it where a few weights take by far the longest steps.
        """
        if self.has_warned_of_full or not self.removed.steps:
            return
        share = self.removed.stats().blocked or 0.0
        if share > _FULL:
            self.has_warned_of_full = True
            less = self.method.advice(more=False) or "store less"
            self._warn(
                f"the protected directions leave no room to learn: {share:.1%} of what the steps "
                f"would learn is removed; {less}, or protect fewer parameters (params)"
            )


_attached: weakref.WeakSet[Steps] = weakref.WeakSet()


@atexit.register
def _warn_if_in_vain() -> None:
    """Warn of a script that ends without an error, and stored no task with any guard."""
    steps = max((steps.steps for steps in _attached if steps.is_in_vain), default=0)
    if steps and not Steps.has_stored and getattr(sys, "last_value", None) is None:
        warnings.warn(
            f"a guard of {steps} steps has protected nothing, because no task was stored: call "
            "guard.end_task(loader) when a task is learned",
            ForgetlessWarning,
            stacklevel=2,
        )


def _is_finite(vector: Tensor) -> bool:
    # A sum needs no memory; one that overflows may be of finite numbers.
    return bool(vector.sum().isfinite()) or bool(vector.isfinite().all())


def _guards_of(optimizer: Optimizer) -> Iterator[Steps]:
    """What changes the optimizer's steps."""
    hooks = optimizer._optimizer_step_post_hooks.values()
    return (hook.steps for hook in hooks if isinstance(hook, Hook))


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """The torch optimizers of one or a list."""
    if not isinstance(optimizer, list | tuple):
        return [_torch_optimizer(optimizer)]
    if not optimizer:
        raise ConfigError("optimizer must be one or a list of at least one, not an empty list")
    found = [*map(_torch_optimizer, optimizer)]
    if len({*map(id, found)}) < len(found):
        raise ConfigError("optimizer must be a list of different optimizers, and has one twice")
    return found


def _torch_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer, also inside a wrapper such as accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, not {kind}")
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "LBFGS cannot be guarded: it takes many steps in one call and learns its curvature "
            "from gradients of steps that would not have been taken"
        )
    return optimizer


def projected(method: Method[Any], project: Projected | None) -> Projected:
    """What of a step to change: the user's choice, or the method's."""
    accepted = "'update' or 'gradient'"
    require(project in (None, "update", "gradient"), "project", project, accepted)
    if project == "update" and method.acts_on == "gradient":
        raise ConfigError(f"{method.name} changes the gradient and cannot project the update")
    return project or method.acts_on
