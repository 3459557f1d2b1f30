"""The protected parameters of a model as one flat vector, and statistics that must not change."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from forgetless.guard.distributed.sharding import local, local_slices
from forgetless.linalg import Growth, Layout, is_under
from forgetless.support.validation import ConfigError, beginnings, require
from forgetless.tangent import chosen_names, require_one_precision


def has_moving_statistics(module: nn.Module) -> bool:
    """Whether training updates running statistics."""
    return any(
        isinstance(layer, _NormBase) and layer.running_mean is not None and layer.training
        for layer in module.modules()
    )


@final
class FrozenStatistics:
    """Keeps a model's layers with running statistics in eval mode, whatever mode the model is in.

    They then normalise by the stored mean and variance and no longer update them; their weights
    and biases are trained as before.

    Arguments:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._layers: list[nn.Module] = []

    def freeze(self) -> None:
        """Freeze the layers, unless they are frozen already."""
        if self._layers:
            return
        # A layer in eval mode inside a model in training mode was frozen by the user.
        in_use = self._module.training
        self._layers = [
            layer
            for layer in self._module.modules()
            if isinstance(layer, _NormBase)
            and layer.running_mean is not None
            and (layer.training or not in_use)
        ]
        for layer in self._layers:
            layer.eval()
            # A training loop calls `model.train()` again and again. A forward hook could set the
            # mode as well, but compiled code does not notice new hooks.
            layer.train = _ConstantMode(layer)  # type: ignore[method-assign]

    def restore(self) -> None:
        """Let the layers follow the model's mode again."""
        for layer in self._layers:
            del layer.train
            layer.train(self._module.training)
        self._layers = []


@final
class _ConstantMode:
    """`train` of a layer that stays in its mode; a class, so that the model can be pickled."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, mode: bool = True) -> nn.Module:
        return self.layer


# None for all; names or prefixes of names, parameters or modules; a function of the name.
Params = nn.Module | str | Iterable[str | nn.Parameter | nn.Module] | Callable[[str], bool] | None

_PREFIXES = "names of parameters or beginnings of them"


@final
@dataclass(frozen=True)
class Flat:
    """A vector (1, p) and views of each parameter's part of it: flat, and in its shape."""

    vector: Tensor
    parts: list[Tensor]
    views: list[Tensor]


@final
class Parameters:
    """Reads and writes a model's parameters as one vector, in the order of `names`.

    For a sharded model p counts the numbers that this process holds.

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
        self.slices = local_slices({name: own[name] for name in names})
        here = {name: tuple(local(own[name]).shape) for name in names}
        self.layout = Layout(here, self.slices or {})
        self.columns = list(self.layout.columns.values())
        self.size = self.layout.size
        self._flats: dict[str, Flat] = {}

    @property
    def device(self) -> torch.device:
        """The one device of the parameters."""
        devices = {t.device for t in self.tensors}
        if len(devices) > 1:
            raise ConfigError(
                f"the protected parameters are on several devices: "
                f"{', '.join(sorted(map(str, devices)))}; choose those of one with params="
            )
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        """At least float32, so that small steps of half-precision weights count."""
        return torch.promote_types(torch.float32, self.tensors[0].dtype)

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        """Device and precision of the vectors."""
        return self.device, self.dtype

    def empty(self) -> Tensor:
        """An uninitialised vector, (1, p)."""
        return torch.empty(1, self.size, dtype=self.dtype, device=self.device)

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Each parameter's part of a vector (1, p), flat."""
        return [vector[0, columns] for columns in self.columns]

    def views(self, vector: Tensor) -> list[Tensor]:
        """Each parameter's part of a vector (1, p), in its shape."""
        return list(self.layout.split(vector[0]).values())

    def flat(self, purpose: str, place: tuple[torch.device, torch.dtype]) -> Flat:
        """A work vector, the same one at every step because splitting it takes time.

        Arguments:
            purpose: its name.
            place: device and precision; finding them takes time, too.
        """
        found = self._flats.get(purpose)
        if found is None or (found.vector.device, found.vector.dtype) != place:
            vector = self.empty()
            found = Flat(vector, self.parts(vector), self.views(vector))
            self._flats[purpose] = found
        return found

    def _local(self) -> list[Tensor]:
        return self.tensors if self.slices is None else [local(t) for t in self.tensors]

    def pointers(self) -> tuple[int, ...]:
        """The parameters' addresses in memory."""
        return tuple([tensor.data_ptr() for tensor in self._local()])

    def versions(self) -> list[int]:
        """How often each parameter was changed in place, as autograd counts it."""
        return [tensor._version for tensor in self._local()]

    def lengths(self) -> Tensor:
        """The norm of each parameter."""
        with torch.no_grad():
            return torch.stack(torch._foreach_norm(self._local(), 2.0, self.dtype))

    def read(self, out: Flat | None = None) -> Tensor:
        """The parameters, (1, p)."""
        vector = self.empty() if out is None else out.vector
        views = self.views(vector) if out is None else out.views
        with torch.no_grad():
            torch._foreach_copy_(views, self._local())
        return vector

    def difference(self, before: Flat, out: Flat) -> None:
        """Out = before − the parameters now."""
        with torch.no_grad():
            torch._foreach_copy_(out.views, self._local())
            torch.sub(before.vector, out.vector, out=out.vector)

    def add(self, flat: Flat, movable: Sequence[int]) -> None:
        """Add a vector to the parameters; it is zero where these cannot move.

        What weights of half precision cannot hold is added at the next step: a sum of many small
        numbers would otherwise be lost, and with it the method's part of the steps.
        """
        with torch.no_grad():
            if not self._rounds:
                torch._foreach_add_(self._local(), flat.views)
                return
            rest, local = self._rest_at((flat.vector.device, flat.vector.dtype)), self._local()
            for i in movable:
                exact = local[i].to(rest.vector) + flat.views[i] + rest.views[i]
                local[i].copy_(exact)
                torch.sub(exact, local[i].to(exact), out=rest.views[i])

    @property
    def _rounds(self) -> bool:
        """Whether weights hold less than the vectors do."""
        return any(t.dtype != self.dtype for t in self.tensors)

    def _rest_at(self, place: tuple[torch.device, torch.dtype]) -> Flat:
        known = self._flats.get("rest")
        rest = self.flat("rest", place)
        if rest is not known:
            rest.vector.zero_()
        return rest

    @property
    def rest(self) -> Tensor | None:
        """What rounding has left for the next step, (1, p); None without any."""
        return self._flats["rest"].vector.clone() if "rest" in self._flats else None

    @rest.setter
    def rest(self, value: Tensor | None) -> None:
        if value is not None:
            self._rest_at(self.place).vector.copy_(value)
        elif "rest" in self._flats:
            self._flats["rest"].vector.zero_()

    def local_part(self, vector: Tensor) -> Tensor:
        """The local part of a vector of the whole model, (1, P) → (1, p)."""
        if self.slices is None:
            return vector
        parts = vector.split([prod(shape) for shape in self.shapes.values()], dim=1)
        pairs = zip(self.slices.values(), parts, strict=True)
        return torch.cat([one.of(part) for one, part in pairs], 1)

    def movable(self, optimizer: Optimizer) -> tuple[int, ...]:
        """The parameters that the optimizer moves now: it has them, and they have a gradient."""
        moves = {
            id(p)
            for group in optimizer.param_groups
            if not _is_zero(group.get("lr"))
            for p in group["params"]
            if p.grad is not None
        }
        return tuple(i for i, t in enumerate(self.tensors) if id(t) in moves)

    def are_in(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has any of them."""
        return not _trained([optimizer]).isdisjoint(map(id, self.tensors))

    def learning_rate(self, optimizers: Sequence[Optimizer]) -> float:
        """Of the first group that trains protected parameters."""
        mine = set(map(id, self.tensors))
        for group in _groups(optimizers):
            if any(id(p) in mine for p in group["params"]):
                return float(group.get("lr", 0.0))
        return 0.0

    def maximized(self, optimizer: Optimizer) -> list[slice]:
        """The columns of the parameters that the optimizer moves up their gradient."""
        groups = (group for group in optimizer.param_groups if group.get("maximize"))
        upwards = {id(p) for group in groups for p in group["params"]}
        return [self.columns[i] for i, t in enumerate(self.tensors) if id(t) in upwards]

    def check_current(self, module: nn.Module) -> None:
        """Reject a model whose parameters were replaced."""
        own = dict(module.named_parameters())
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if name not in own:
                raise ConfigError(_missing(name))
            if own[name] is not tensor or tuple(tensor.shape) != self.shapes[name]:
                raise ConfigError(
                    f"the model's {name} is another parameter than when the guard was made: if "
                    "its first rows are the old ones, call guard.adopt(model, optimizer) with an "
                    "optimizer that trains it"
                )

    def replaced_in(self, module: nn.Module, optimizer: Optimizer) -> str | None:
        """A protected parameter that a model lost, if an optimizer trains others of the model."""
        own, mine = dict(module.named_parameters()), set(map(id, self.tensors))
        pairs = zip(self.names, self.tensors, strict=True)
        lost = next((name for name, tensor in pairs if own.get(name) is not tensor), None)
        trains = not _trained([optimizer]).isdisjoint(set(map(id, own.values())) - mine)
        return lost if trains else None

    def growth(self, new: Self) -> Growth:
        """From these parameters to those of a model that has more rows or more parameters.

        Every other change of a shape is rejected.
        """
        if self.slices is not None or new.slices is not None:
            raise ConfigError("a model sharded by fully_shard cannot grow under a guard")
        for name, shape in self.shapes.items():
            there = new.shapes[name]
            if there[1:] != shape[1:] or len(there) != len(shape) or there[:1] < shape[:1]:
                raise ConfigError(
                    f"{name} had the shape {shape} and has {there}: a layer may get more rows "
                    "(a larger first dimension, more outputs), and no other shape"
                )
        return Growth(self.layout, new.layout)

    def changed_in(self, new: Self) -> str | None:
        """The first parameter whose values in a grown model are not the same."""
        theirs = dict(zip(new.names, new.tensors, strict=True))
        with torch.no_grad():
            for name, tensor in zip(self.names, self.tensors, strict=True):
                there = theirs[name]
                same = there[: len(tensor)] if tensor.dim() else there
                if not torch.equal(same.to(tensor), tensor):
                    return name
        return None

    def along_gradients(self, optimizer: Optimizer, *vectors: Flat) -> Tensor | None:
        """For each vector v the product gᵀ v with the gradients that an optimizer descends along.

        None with sparse gradients. Parameter by parameter, so that it takes little memory.
        """
        upwards = self.maximized(optimizer)
        total = torch.zeros(len(vectors), dtype=self.dtype, device=self.device)
        for i, tensor in enumerate(self.tensors):
            if tensor.grad is None:
                continue
            gradient = local(tensor.grad).detach()
            if gradient.is_sparse:
                return None
            gradient = gradient.flatten().to(total)
            found = torch.stack([torch.dot(gradient, vector.parts[i]) for vector in vectors])
            total += -found if self.columns[i] in upwards else found
        return total

    def gradients(self) -> Tensor:
        """The gradients, (1, p), zero where there is none."""
        out = self.empty().zero_()
        for view, tensor, name in zip(self.views(out), self.tensors, self.names, strict=True):
            if tensor.grad is not None:
                gradient = local(tensor.grad)
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
                local(gradient).detach().copy_(views[i])


def chosen_parameters(module: nn.Module, params: Params, exclude: Sequence[str]) -> tuple[str, ...]:
    """The chosen parameters without the excluded ones.

    By default those that require a gradient; frozen ones must be chosen.
    """
    own = dict(module.named_parameters())
    if params is None:
        _reject_quantised(module)
        chosen = [name for name, p in own.items() if p.requires_grad]
    elif callable(params) and not isinstance(params, nn.Module):
        chosen = [name for name in own if params(name)]
    else:
        chosen = list(chosen_names(module, _without_modules(params)))
    require(isinstance(exclude, Iterable), "exclude", exclude, _PREFIXES)
    for prefix in exclude:
        fits = isinstance(prefix, str) and _names_under(module, [prefix])
        require(bool(fits), "exclude", prefix, _PREFIXES, beginnings(own))
    excluded = _names_under(module, exclude)
    return tuple(name for name in chosen if name not in excluded)


def _reject_quantised(module: Any) -> None:
    """Reject a model of transformers with quantised weights and no adapters beside them."""
    if not getattr(module, "is_quantized", False) or hasattr(module, "peft_config"):
        return
    for name, p in module.named_parameters():
        if not (p.is_floating_point() or p.is_complex()):
            raise ConfigError(
                f"the model is quantised ({name} is {str(p.dtype)[6:]}), so its weights cannot be "
                "trained or protected: load it in bfloat16 or float32, or train adapters (peft)"
            )


def protected_names(
    module: nn.Module, optimizers: Sequence[Optimizer], chosen: Sequence[str]
) -> tuple[str, ...]:
    """The chosen parameters that an optimizer trains."""
    own = dict(module.named_parameters())
    trained = _trained(optimizers)
    names = [name for name in chosen if id(own[name]) in trained]
    if not names:
        raise ConfigError(
            "there is nothing to protect: none of the chosen parameters is trained by the optimizer"
        )
    for name in names:
        real = own[name].is_floating_point()
        require(real, f"the parameter {name}", str(own[name].dtype), "of real numbers")
    return tuple(names)


def grown_names(
    module: nn.Module, optimizers: Sequence[Optimizer], old: Sequence[str], chosen: Sequence[str]
) -> tuple[str, ...]:
    """The protected parameters of a model that has grown: the old ones, and chosen new ones."""
    own = dict(module.named_parameters())
    for name in old:
        if name not in own:
            raise ConfigError(_missing(name))
    trained = _trained(optimizers)
    new = {n for n in chosen if n not in old and n in own and id(own[n]) in trained}
    # As a guard made for this model would have them: its state then fits.
    return tuple(name for name in own if name in new or name in old) if new else tuple(old)


def unprotected(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    names: Collection[str],
    chosen: Sequence[str] | None,
    exclude: Sequence[str],
) -> list[str]:
    """The parameters that are trained now and should be protected, but are not.

    Arguments:
        module: the model.
        optimizers: its optimizers.
        names: the protected parameters.
        chosen: the parameters to protect; None for all that are trained.
        exclude: names, or beginnings of names, that are excluded.
    """
    trained = _trained(optimizers)
    known = _names_under(module, exclude) | set(names)
    return [
        name
        for name, p in module.named_parameters()
        if p.requires_grad and id(p) in trained and name not in known
        if chosen is None or name in chosen
    ]


def untrained_versions(
    module: nn.Module, optimizers: Sequence[Optimizer], exclude: Sequence[str]
) -> dict[str, int]:
    """The versions of the parameters that need a gradient and that none of the optimizers has.

    Arguments:
        module: the model.
        optimizers: its optimizers.
        exclude: names, or beginnings of names, that are excluded.
    """
    trained, excluded = _trained(optimizers), _names_under(module, exclude)
    return {
        name: p._version
        for name, p in module.named_parameters()
        if p.requires_grad and id(p) not in trained and name not in excluded
    }


def present(module: nn.Module, exclude: Sequence[str]) -> tuple[str, ...]:
    """The excluded names that a changed model still has."""
    own = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return tuple(e for e in exclude if any(n == e or n.startswith(f"{e}.") for n in own))


def _trained(optimizers: Sequence[Optimizer]) -> set[int]:
    """The ids of the optimizers' parameters."""
    return {id(p) for group in _groups(optimizers) for p in group["params"]}


def _groups(optimizers: Sequence[Optimizer]) -> Iterator[dict[str, Any]]:
    return (group for optimizer in optimizers for group in optimizer.param_groups)


def _missing(name: str) -> str:
    return (
        f"the model has no parameter {name} any more, which the stored tasks are about (merging an "
        "adapter removes it, and changes the weights below): make a new guard for the model as it "
        "is, and store the tasks again"
    )


def _names_under(module: nn.Module, prefixes: Iterable[str]) -> set[str]:
    """The parameters with these names or beginnings of names, tied ones by any of their names."""
    name_of = {id(p): name for name, p in module.named_parameters()}
    every = list(module.named_parameters(remove_duplicate=False))
    return {name_of[id(p)] for alias, p in every if is_under(alias, prefixes)}


def _is_zero(lr: object) -> bool:
    # Comparing a tensor on a GPU would wait for it.
    return isinstance(lr, int | float) and lr == 0


def _without_modules(
    params: nn.Module | str | Iterable[str | nn.Parameter | nn.Module],
) -> nn.Module | str | list[str | nn.Parameter]:
    """The choice with each module in a list replaced by its parameters."""
    if isinstance(params, nn.Module | str | nn.Parameter):
        return [params] if isinstance(params, nn.Parameter) else params
    accepted = "names, modules, parameters, a list of them or a function of the name"
    require(isinstance(params, Iterable), "params", params, accepted)
    spelled: list[str | nn.Parameter] = []
    for one in params:
        spelled += list(one.parameters()) if isinstance(one, nn.Module) else [one]
    return spelled
