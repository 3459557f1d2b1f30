"""What happens to an optimizer's steps: hooks before and after each of them."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from forgetless.guard.arguments import Projected
from forgetless.guard.model import GuardedLossGrad, GuardedModel, full_precision
from forgetless.guard.report import Removed
from forgetless.methods import Method, Nothing, State
from forgetless.methods.orthogonal import Orthogonal
from forgetless.subspace import Subspace
from forgetless.support.collectives import Ranks
from forgetless.support.cuda_graphs import Repeated
from forgetless.support.errors import ConfigError

_FULL = 0.95  # share of the steps removed at which there is no room left to learn
_LOOK_EVERY = 50  # steps between looks at that share, which make a GPU wait
_PATTERNS = 8  # choices of movable parameters whose restricted subspaces are kept


@final
class Hook:
    """What an optimizer calls, run as it is written, also where the training step is compiled."""

    def __init__(self, steps: "Steps", function: Callable[..., Any]) -> None:
        self.steps = steps
        self._function = function
        self._uncompiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # it takes seconds to import
            return self._function(*args)
        if self._uncompiled is None:
            self._uncompiled = torch.compiler.disable(self._function)
        return self._uncompiled(*args)


@final
class Steps:
    """Lets a method change every step of an optimizer.

    Arguments:
        model: the model.
        method: the method.
        project: whether the optimizer's update is changed or the gradient it is given.
        generator: of random memory batches.
        bring: called when the model was moved or made of another precision, to bring the memory
            there.
        ranks: the processes that each hold a part of every parameter; None if all is here.
    """

    def __init__(
        self,
        model: GuardedModel,
        method: Method[Any],
        project: Projected,
        generator: torch.Generator,
        bring: Callable[[], None],
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self.method = method
        self.project = project
        self.generator = generator
        self._bring = bring
        self._ranks = ranks
        self._parameters = model.parameters
        self._handles: list[RemovableHandle] = []
        self.optimizer: Optimizer | None = None
        self._knows_before = False  # whether it read the parameters before a step
        self._warned = False
        self.follow(None)

    def follow(self, state: State | None) -> None:
        """Change steps by this memory from now on; None for not at all."""
        self._state = None if isinstance(state, Nothing) else state
        self._place = self._parameters.place
        self._restricted: dict[tuple[int, ...], State] = {}
        self.removed = Removed(self._parameters.names, self._ranks)
        self._read_all = Repeated(self._read)
        self._correct_all = Repeated(partial(self._correct, tuple(range(len(self.removed.names)))))

    def follow_model(self) -> None:
        """Bring the memory to where the model is now."""
        if self._parameters.place != self._place:
            self._bring()

    def attach(self, optimizer: Optimizer) -> None:
        """Watch over the steps of this optimizer, and of no other."""
        self._check(optimizer)
        self.remove()
        self.optimizer = optimizer
        self._handles = [
            optimizer.register_step_pre_hook(Hook(self, self._before_step)),
            optimizer.register_step_post_hook(Hook(self, self._after_step)),
        ]

    def remove(self) -> None:
        """Let the optimizer go its own way."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _check(self, optimizer: Optimizer) -> None:
        mine = {id(t): n for n, t in zip(self._parameters.names, self._parameters.tensors)}
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not trained & mine.keys():
            raise ConfigError("the optimizer trains none of the protected parameters")
        hooks = optimizer._optimizer_step_post_hooks.values()
        for other in (hook.steps for hook in hooks if isinstance(hook, Hook)):
            both = self.method.is_projection and other.method.is_projection
            common = [mine[id(t)] for t in other._parameters.tensors if id(t) in mine]
            if other is not self and common and both:
                raise ConfigError(
                    f"another guard projects this optimizer's steps of {common[0]} already, and "
                    "of two projections only the last one holds; call its remove() first"
                )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._state is None:
            return None
        self.follow_model()
        if self.project == "update":
            self._read_all(self._parameters.pointers(), self._place[0])
            self._knows_before = True
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._change_gradients(optimizer)
            return None
        # The gradients come into being inside the step: change them there.
        changed = self._after_closure(closure, optimizer)
        if len(args) > 1:
            return (args[0], changed, *args[2:]), kwargs
        return args, {**kwargs, "closure": changed}

    def _after_closure(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        def changed() -> Any:
            loss = closure()
            self._change_gradients(optimizer)
            return loss

        return changed

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        knows_before, self._knows_before = self._knows_before, False
        movable = self._parameters.movable(optimizer) if knows_before else ()
        if not movable:
            return
        if len(movable) == len(self._parameters.names) and self._only_launches():
            self._correct_all(self._parameters.pointers(), self._place[0])
        else:
            self._correct(movable)
        self._noted()

    def _only_launches(self) -> bool:
        """Whether changing a step is known to be the GPU's work alone, the same every time."""
        state = self._state
        here = isinstance(state, Subspace) and state.storage.device in (None, self._place[0])
        alone = self._ranks is None and self._parameters.shares is None
        return here and alone and type(self.method).update is Orthogonal.update

    def _read(self) -> None:
        """Remember the parameters before a step."""
        self._parameters.read(self._parameters.flat("before", self._place))

    def _correct(self, movable: tuple[int, ...]) -> None:
        """Take back what the method takes out of the step from there."""
        flat = partial(self._parameters.flat, place=self._place)
        before, step, removed = flat("before"), flat("step"), flat("removed")
        self._parameters.difference(before, step)  # what the optimizer takes away
        kept = self._changed(step.vector, before.vector, movable)
        torch.sub(step.vector, kept, out=removed.vector)
        self._parameters.add(removed)
        self.removed.add(step.parts, removed.parts)

    def _change_gradients(self, optimizer: Optimizer) -> None:
        movable = self._parameters.movable(optimizer)
        if not movable:
            return
        scale = getattr(optimizer, "grad_scale", None)  # fused optimizers unscale on their own
        gradient = self._parameters.gradients()
        if scale is not None:
            gradient /= scale.to(gradient.device)
        # The gradient that is gone down along, also where the optimizer goes up along its own.
        upwards = self._parameters.maximized(optimizer)
        for columns in upwards:
            gradient[:, columns].neg_()
        kept = self._changed(gradient, self._parameters.read(), movable)
        if self.method.is_projection:
            parts = self._parameters.parts
            self.removed.add(parts(gradient), parts(gradient - kept))
            self._noted()
        if upwards:
            kept = kept.clone()
        for columns in upwards:
            kept[:, columns].neg_()
        if scale is not None:
            kept = kept * scale.to(kept.device)
        self._parameters.write_gradients(kept, movable)

    def _changed(self, g: Tensor, theta: Tensor, movable: tuple[int, ...]) -> Tensor:
        """What the method makes of a step or gradient when only some parameters can move."""
        state: Any = self._state
        mask = None
        if len(movable) < len(self._parameters.names):
            columns = [self._parameters.columns[i] for i in movable]
            mask = torch.zeros_like(g[0], dtype=torch.bool)
            for some in columns:
                mask[some] = True
            g = g * mask
            if isinstance(state, Subspace):
                state = self._within(state, movable, columns)
        loss_grad = GuardedLossGrad(self.model, theta, mask, self.generator)
        with torch.no_grad(), full_precision(g.device):
            kept: Tensor = self.method.update(g, state, theta, loss_grad)
        return kept if mask is None else kept * mask

    def _within(self, state: Subspace, movable: tuple[int, ...], columns: list[slice]) -> State:
        """The subspace restricted to these columns, computed once for every choice of them."""
        if movable not in self._restricted:
            if len(self._restricted) == _PATTERNS:
                self._restricted.pop(next(iter(self._restricted)))
            self._restricted[movable] = state.restricted(columns)
        return self._restricted[movable]

    def _noted(self) -> None:
        """One more step was noted."""
        self.removed.steps += 1
        if self.removed.steps % _LOOK_EVERY == 0:
            self.look()

    def look(self) -> None:
        """Warn, once, if the steps that were seen have nearly all been removed."""
        if self._warned or not self.removed.steps:
            return
        share = self.removed.stats().removed
        if share > _FULL:
            self._warned = True
            warnings.warn(
                f"the protected directions leave no room to learn: {share:.1%} of the steps is "
                "removed; keep fewer directions (components, samples, max_rank) or protect fewer "
                "parameters (params)",
                stacklevel=5,
            )
