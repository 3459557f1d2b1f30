"""The protected parameters of a user's model as one flat vector (1, p)."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgetless.guard.distributed.sharding import here, shares_of
from forgetless.support.errors import ConfigError, require
from forgetless.tangent import chosen_names, require_one_precision

# None for all; names or prefixes of names, parameters or modules; a function of the name.
Params = nn.Module | str | Iterable[str | nn.Parameter | nn.Module] | Callable[[str], bool] | None


@final
@dataclass(frozen=True)
class Flat:
    """A vector (1, p) and its parts that belong to each parameter: flat, and in their shapes."""

    vector: Tensor
    parts: list[Tensor]
    views: list[Tensor]


@final
class Parameters:
    """Reads and writes a model's parameters as one vector, in the order of `names`.

    Of a sharded model the vector has what this process holds: p is then this process's number.

    Arguments:
        module: the model.
        names: the protected parameters.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        own = dict(module.named_parameters())
        self.names = tuple(names)
        self.tensors: list[Tensor] = [own[name] for name in names]
        require_one_precision(self.tensors)
        self.shapes = {name: tuple(own[name].shape) for name in names}
        self.shares = shares_of({name: own[name] for name in names})
        self._shapes_here = [tuple(here(t).shape) for t in self.tensors]
        self._sizes = [prod(shape) for shape in self._shapes_here]
        ends = list(accumulate(self._sizes))
        self.columns = [slice(end - n, end) for end, n in zip(ends, self._sizes, strict=True)]
        self.size = ends[-1]
        self._flats: dict[str, Flat] = {}

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        devices = {t.device for t in self.tensors}
        if len(devices) > 1:
            raise ConfigError(
                f"the protected parameters are on several devices: "
                f"{', '.join(sorted(map(str, devices)))}; choose those of one with params="
            )
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of the vector: at least float32, so that small steps of half-precision weights count."""
        return torch.promote_types(torch.float32, self.tensors[0].dtype)

    def empty(self) -> Tensor:
        """A vector of no particular value, (1, p)."""
        return torch.empty(1, self.size, dtype=self.dtype, device=self.device)

    def parts(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector (1, p) that belong to each parameter, flat."""
        return list(vector[0].split(self._sizes))

    def views(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector (1, p) in the parameters' shapes."""
        pairs = zip(self.parts(vector), self._shapes_here, strict=True)
        return [part.view(shape) for part, shape in pairs]

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        """Where and in which precision vectors are."""
        return self.device, self.dtype

    def flat(self, purpose: str, place: tuple[torch.device, torch.dtype]) -> Flat:
        """A vector to work with, the same one at every step: cutting it up takes time.

        Arguments:
            purpose: what tells it from others.
            place: as it is now; looking at all parameters for it takes time, too.
        """
        kept = self._flats.get(purpose)
        if kept is None or (kept.vector.device, kept.vector.dtype) != place:
            vector = self.empty()
            kept = Flat(vector, self.parts(vector), self.views(vector))
            self._flats[purpose] = kept
        return kept

    def pointers(self) -> tuple[int, ...]:
        """Where in memory the parameters are."""
        return tuple([tensor.data_ptr() for tensor in self._here()])

    def read(self, out: Flat | None = None) -> Tensor:
        """The parameters, (1, p)."""
        vector = self.empty() if out is None else out.vector
        views = self.views(vector) if out is None else out.views
        with torch.no_grad():
            torch._foreach_copy_(views, self._here())
        return vector

    def _here(self) -> list[Tensor]:
        """The parameters, or what this process has of them."""
        return self.tensors if self.shares is None else [here(t) for t in self.tensors]

    def of_whole(self, vector: Tensor) -> Tensor:
        """What this process holds of a vector of all parameters, (1, P) → (1, p)."""
        if self.shares is None:
            return vector
        parts = vector.split([prod(shape) for shape in self.shapes.values()], dim=1)
        pairs = zip(self.shares.values(), parts, strict=True)
        return torch.cat([share.of(part) for share, part in pairs], 1)

    def difference(self, before: Flat, out: Flat) -> None:
        """What the parameters were, less what they are."""
        with torch.no_grad():
            torch._foreach_copy_(out.views, self._here())
            torch.sub(before.vector, out.vector, out=out.vector)

    def add(self, flat: Flat) -> None:
        """Add a vector to the parameters."""
        with torch.no_grad():
            torch._foreach_add_(self._here(), flat.views)

    def movable(self, optimizer: Optimizer) -> tuple[int, ...]:
        """Which parameters the optimizer moves now: those that it has and that have a gradient."""
        moves = {
            id(p)
            for group in optimizer.param_groups
            if not _is_zero(group.get("lr"))
            for p in group["params"]
            if p.grad is not None
        }
        return tuple(i for i, t in enumerate(self.tensors) if id(t) in moves)

    def maximized(self, optimizer: Optimizer) -> list[slice]:
        """The columns of parameters whose gradient the optimizer goes up along."""
        groups = (group for group in optimizer.param_groups if group.get("maximize"))
        upwards = {id(p) for group in groups for p in group["params"]}
        return [self.columns[i] for i, t in enumerate(self.tensors) if id(t) in upwards]

    def check_current(self, module: nn.Module) -> None:
        """Refuse a model whose parameters are others than at first."""
        own = dict(module.named_parameters())
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if own.get(name) is not tensor or tuple(tensor.shape) != self.shapes[name]:
                raise ConfigError(
                    f"the model's {name} is another parameter than when the guard was made; make "
                    "a new guard, and give it the old one's state_dict"
                )

    def gradients(self) -> Tensor:
        """The gradients, (1, p), zero where there is none."""
        out = self.empty().zero_()
        for view, tensor, name in zip(self.views(out), self.tensors, self.names, strict=True):
            if tensor.grad is not None:
                gradient = here(tensor.grad)
                if gradient.is_sparse:
                    raise ConfigError(
                        f"the gradient of {name} is sparse, and is to be changed: make the layer "
                        "with sparse=False, or use project='update' with a method that can"
                    )
                view.copy_(gradient.detach())
        return out

    def write_gradients(self, vector: Tensor, movable: Sequence[int]) -> None:
        """Set the gradients of these parameters."""
        views = self.views(vector)
        for i in movable:
            gradient = self.tensors[i].grad
            if gradient is not None:
                here(gradient).detach().copy_(views[i])


def protected_names(
    module: nn.Module, optimizer: Optimizer, params: Params, exclude: Sequence[str]
) -> tuple[str, ...]:
    """The chosen parameters that the optimizer has, without the excluded ones.

    If nothing is chosen, those that require a gradient; a frozen one must be chosen.
    """
    own = dict(module.named_parameters())
    if params is None:
        chosen = [name for name, p in own.items() if p.requires_grad]
    elif callable(params) and not isinstance(params, nn.Module):
        chosen = [name for name in own if params(name)]
    else:
        chosen = list(chosen_names(module, _spelled(params)))
    left_out = _left_out(module, exclude)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [n for n in chosen if n not in left_out and id(own[n]) in trained]
    if not names:
        raise ConfigError(
            "there is nothing to protect: none of the chosen parameters is trained by the optimizer"
        )
    for name in names:
        real = own[name].is_floating_point()
        require(real, f"the parameter {name}", str(own[name].dtype), "of real numbers")
    return tuple(names)


def warn_of_newcomers(
    module: nn.Module, optimizer: Optimizer | None, names: Sequence[str], exclude: Sequence[str]
) -> None:
    """Say which parameters are trained by now, though they were not when all were chosen.

    Arguments:
        module: the model.
        optimizer: what trains it, None for nothing.
        names: what was trained then.
        exclude: names or beginnings of names that were left out, and still are.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    left_out = {name for prefix in _several(exclude) for name in _beginning_with(module, prefix)}
    known = left_out | set(names)
    new = [n for n, p in module.named_parameters() if id(p) in trained and n not in known]
    if new:
        warnings.warn(
            f"{new[0]} is trained now and was not when the guard was made, so it is not protected: "
            "make a guard that has it, or choose by params= what is protected if that is meant",
            stacklevel=4,
        )


def _left_out(module: nn.Module, exclude: Sequence[str]) -> set[str]:
    """The parameters that `exclude` names."""
    accepted = "names of parameters or beginnings of them, such as 'head'"
    require(isinstance(exclude, str | Iterable), "exclude", exclude, accepted)
    found: set[str] = set()
    for prefix in _several(exclude):
        mine = _beginning_with(module, prefix) if isinstance(prefix, str) else set()
        require(bool(mine), "exclude", prefix, accepted)
        found |= mine
    return found


def _several(exclude: Sequence[str]) -> Sequence[str]:
    return (exclude,) if isinstance(exclude, str) else exclude


def _beginning_with(module: nn.Module, prefix: str) -> set[str]:
    """The parameters of that name or that beginning of it, tied ones by any of their names."""
    name_of = {id(p): name for name, p in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name_of[id(p)] for a, p in every if a == prefix or a.startswith(f"{prefix}.")}


def _is_zero(lr: object) -> bool:
    # A tensor may be on a GPU, which would have to be waited for.
    return isinstance(lr, int | float) and lr == 0


def _spelled(
    params: nn.Module | str | Iterable[str | nn.Parameter | nn.Module],
) -> nn.Module | str | list[str | nn.Parameter]:
    """Modules among the choices as their parameters."""
    if isinstance(params, nn.Module | str | nn.Parameter):
        return [params] if isinstance(params, nn.Parameter) else params
    accepted = "names, modules, parameters, a list of them or a function of the name"
    require(isinstance(params, Iterable), "params", params, accepted)
    spelled: list[str | nn.Parameter] = []
    for one in params:
        spelled += list(one.parameters()) if isinstance(one, nn.Module) else [one]
    return spelled
