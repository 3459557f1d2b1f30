"""What a method remembers: a tree of tensors and samples, saved and restored without its help.

A state is made of None, numbers, texts, tuples, lists, dicts, frozen dataclasses, tensors with a
leading dimension of S seeds, sample sets and directions. It is never changed in place.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from forgetless.linalg import Growth
from forgetless.methods.base import FinishedTask, LoadSamples, Method, View
from forgetless.subspace import (
    DenseSubspace,
    Directions,
    FactoredSubspace,
    InputSubspace,
    KroneckerSubspace,
    Storage,
)
from forgetless.support.files import json_tensor, json_value
from forgetless.support.validation import ConfigError, require

STRUCTURE = "structure"  # the entry that says how a state is built
_PLAIN = (bool, int, float, str, type(None))
_DIRECTIONS = {
    kind.__name__: kind
    for kind in (DenseSubspace, FactoredSubspace, InputSubspace, KroneckerSubspace)
}


def state_tensors(state: Any, seed: int) -> dict[str, Tensor]:
    """The tensors of one seed by their path in the state, and how it is built."""
    tensors: dict[str, Tensor] = {}
    structure = _flattened(state, seed, "", tensors)
    if STRUCTURE in tensors:
        raise ConfigError(f"a state cannot have a tensor of the name {STRUCTURE!r}")
    return tensors | {STRUCTURE: json_tensor(structure)}


def restored_state(
    of_seeds: Sequence[Mapping[str, Tensor]],
    method: Method[Any],
    theta: Tensor,
    storage: Storage,
    load: LoadSamples,
) -> Any:
    """The state of which `state_tensors` gave these for each seed.

    Arguments:
        of_seeds: the tensors of each seed.
        method: whose state it is; its module and `state_types` say which classes may occur.
        theta: the weights, (S, p); tensors are put where they are.
        storage: how directions are stored.
        load: from the tensors of each seed to a sample set.
    """
    structure = json_value(of_seeds[0][STRUCTURE])
    return _Reader(of_seeds, method, theta, storage, load).read(structure, "")


def state_bytes(state: Any) -> int:
    """What the state of one seed takes in memory."""
    tensors = state_tensors(state, 0)
    return sum(tensor.nbytes for name, tensor in tensors.items() if name != STRUCTURE)


def take_step(method: Method[Any], g: Tensor, state: Any, view: View) -> tuple[Tensor, Any]:
    """One `update`, checked where the method is not known to be sound.

    Arguments:
        g: the gradient or the optimizer's update, (S, p).
    """
    if method.recordable:
        step, after = method.update(g, state, view)
        if after is not state:
            raise ConfigError(
                f"{type(method).__name__}.update must return the state it is given, since it says "
                "recordable = True: a GPU may repeat the step without it"
            )
        return step, state
    before = state_marks(state)
    # A copy, since the method may store or change it, and so may the driver.
    found: Any = method.update(g.clone(), state, view)
    name = type(method).__name__
    if not isinstance(found, tuple) or len(found) != 2:
        raise ConfigError(
            f"{name}.update must return the step and the state, not {_described(found)}"
        )
    step, after = found
    if not isinstance(step, Tensor) or step.shape != g.shape:
        raise ConfigError(
            f"{name}.update must return a step of shape {tuple(g.shape)}, not {_described(step)}"
        )
    check_unchanged(method, "update", state, before)
    step = step.detach()  # it may come from an autograd graph of the method's own
    return step, state if after is state else check_state(method, after, len(g))


def consolidated(
    method: Method[Any], state: Any, view: View, task: FinishedTask, seeds: int
) -> Any:
    """The state after a task is learned, checked."""
    before = state_marks(state)
    after = method.consolidate(state, view, task)
    check_unchanged(method, "consolidate", state, before)
    if after is None and state is not None:
        raise ConfigError(
            f"{type(method).__name__}.consolidate returned None: it must return the next state, or "
            "the present one if nothing is to be stored"
        )
    return check_state(method, after, seeds)


def check_unchanged(method: Method[Any], where: str, state: Any, before: list[object]) -> None:
    """Reject a method that changed its state in place.

    Arguments:
        where: the function that may have done it.
        before: `state_marks` before that.
    """
    if state_marks(state) != before:
        raise ConfigError(
            f"{type(method).__name__}.{where} changed its state in place, which could not be "
            "resumed: make new tensors and containers, and return the new state"
        )


def state_marks(state: Any) -> list[object]:
    """What differs once a state is changed in place."""
    return [*_marks(state)]


def check_state(method: Method[Any], state: Any, seeds: int) -> Any:
    """Reject a state that could not be saved, and return it as it would be restored.

    Restored tensors are contiguous, and products with others may differ in their last bits.
    """
    for path, leaf in _leaves(state, ""):
        where = f"the state of {type(method).__name__}" + (f" at {path}" if path else "")
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) != seeds):
            raise ConfigError(
                f"{where} must be a tensor with a leading dimension of {seeds} seed"
                f"{'' if seeds == 1 else 's'}, not one of shape {tuple(leaf.shape)}"
            )
        if not isinstance(leaf, (Tensor, *_PLAIN)) and not _is_stored(leaf):
            raise ConfigError(
                f"{where} must be a tensor, samples, directions, a number, text, None, or a "
                f"tuple, list, dict or dataclass of these, not {_described(leaf)}"
            )
    return _contiguous(state)


def check_storage(method: Method[Any], state: Any, asked: Storage) -> None:
    """Reject a storage that the directions of a method do not have.

    Arguments:
        state: before the first step.
    """
    if not method.keeps_directions:
        return
    of_state, of_run = ((s.kind, s.dtype, s.device) for s in (state.storage, asked))
    one_way = f"that of {type(state).__name__}, which has one way to store its directions, dense"
    require(of_state == of_run, "storage", str(asked), one_way)


def grown_state(method: Method[Any], state: Any, growth: Growth, theta: Tensor) -> Any:
    """The state for a network with more weights, of which no task has used the new ones.

    A state that knows how has a function `grown(growth, theta)`, as directions do.

    Arguments:
        method: whose state it is.
        state: for the weights before.
        growth: which weights are new.
        theta: all weights, (S, p').
    """

    def grown(leaf: Any) -> Any:
        if hasattr(leaf, "grown"):
            return leaf.grown(growth, theta)
        per_weight = isinstance(leaf, Tensor) and leaf.shape[-1:] == (growth.old.size,)
        if not per_weight or not leaf.is_floating_point():
            return leaf
        if not method.zero_for_new_weights:
            raise ConfigError(
                f"{type(method).__name__} stores numbers per weight and does not say what they "
                "are for new ones, so the protected layers cannot get more rows: say "
                "zero_for_new_weights = True in the method if they are zero"
            )
        return growth.padded(leaf)

    new = grown(state) if hasattr(state, "grown") else _with_leaves(state, grown)
    return check_state(method, new, len(theta))


def _contiguous(node: Any) -> Any:
    """The same tree with contiguous tensors; itself if they are."""
    return _with_leaves(node, lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf)


def _with_leaves(node: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree with its leaves changed; itself if they are as before."""
    parts = _children(node)
    if parts is None:
        return change(node)
    found = [_with_leaves(part, change) for part in parts.values()]
    if all(new is old for new, old in zip(found, parts.values(), strict=True)):
        return node
    if isinstance(node, Mapping):
        return dict(zip(node, found, strict=True))
    if isinstance(node, tuple | list):
        return tuple(found) if isinstance(node, tuple) else found
    return replace(node, **dict(zip(parts, found, strict=True)))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _is_stored(value: Any) -> bool:
    """Whether it is a leaf that gives its own tensors: samples or directions."""
    return isinstance(value, Directions) or (hasattr(value, "tensors") and hasattr(value, "select"))


def _children(node: Any) -> dict[str, Any] | None:
    """The named parts of a container; None for a leaf."""
    if _is_stored(node):
        return None
    if isinstance(node, Mapping):
        return {str(key): value for key, value in node.items()}
    if isinstance(node, tuple | list):
        return {str(i): value for i, value in enumerate(node)}
    if is_dataclass(node) and not isinstance(node, type):
        return {f.name: getattr(node, f.name) for f in fields(node)}
    return None


def _leaves(node: Any, path: str, around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The leaves by their path; `around` are the containers that a node is in."""
    parts = _children(node)
    if parts is None:
        yield path, node
        return
    if id(node) in around:
        raise ConfigError(f"a state cannot hold itself, as it does at {path}")
    for name, part in parts.items():
        yield from _leaves(part, f"{path}.{name}" if path else name, (*around, id(node)))


def _marks(state: Any) -> Iterator[object]:
    for path, leaf in _leaves(state, ""):
        if isinstance(leaf, Tensor):
            yield path, id(leaf), leaf._version
        elif _is_stored(leaf):
            # Views of a tensor have its version.
            own = vars(leaf) if isinstance(leaf, Directions) else leaf.tensors(0)
            yield path, id(leaf), *(t._version for t in own.values() if isinstance(t, Tensor))
        else:
            yield path, leaf


def _flattened(node: Any, seed: int, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """How a node is built; its tensors are put into the dictionary."""
    prefix = f"{path}." if path else ""
    if isinstance(node, Tensor):
        tensors[path or "value"] = node[seed]
        return {"kind": "tensor"}
    if isinstance(node, _PLAIN):
        return {"kind": "plain", "value": node}
    if _is_stored(node):
        tensors |= {prefix + name: t for name, t in node.tensors(seed).items()}
        if isinstance(node, Directions):
            return {"kind": "directions", "name": type(node).__name__}
        return {"kind": "samples"}
    parts = _children(node)
    if parts is None:
        raise ConfigError(f"a state cannot hold {_described(node)}")
    built = {name: _flattened(p, seed, prefix + name, tensors) for name, p in parts.items()}
    if isinstance(node, Mapping):
        numbers = [key for key in node if not isinstance(key, str)]
        if any(not isinstance(key, int) for key in numbers) or len(parts) != len(node):
            raise ConfigError("the keys of a dict in a state must be texts or whole numbers")
        return {"kind": "dict", "parts": built, "numbers": [str(key) for key in numbers]}
    if isinstance(node, tuple | list):
        return {"kind": "tuple" if isinstance(node, tuple) else "list", "parts": built}
    return {"kind": "dataclass", "name": type(node).__name__, "parts": built}


@final
@dataclass(frozen=True)
class _Reader:
    """Builds a state from its tensors; the arguments are those of `restored_state`."""

    of_seeds: Sequence[Mapping[str, Tensor]]
    method: Method[Any]
    theta: Tensor
    storage: Storage
    load: LoadSamples

    def read(self, built: Mapping[str, Any], path: str) -> Any:
        """The node at a path, from how it is built."""
        kind, prefix = built["kind"], f"{path}." if path else ""
        if kind == "plain":
            return built["value"]
        if kind == "tensor":
            rows = torch.stack([of[path or "value"] for of in self.of_seeds])
            return rows.to(self.theta.device)
        if kind in ("samples", "directions"):
            parts = [
                {n.removeprefix(prefix): t for n, t in of.items() if n.startswith(prefix)}
                for of in self.of_seeds
            ]
            for part in parts:
                part.pop(STRUCTURE, None)
            if kind == "samples":
                return self.load(parts)
            name = built["name"]
            its = _DIRECTIONS[name] if name in _DIRECTIONS else self._class(name)
            return its.restore(parts, self.theta, self.storage)
        values = {name: self.read(part, prefix + name) for name, part in built["parts"].items()}
        if kind == "dict":
            numbers = set(built["numbers"])
            return {int(n) if n in numbers else n: value for n, value in values.items()}
        if kind in ("tuple", "list"):
            return (tuple if kind == "tuple" else list)(values.values())
        if kind == "dataclass":
            return self._class(built["name"])(**values)
        raise ValueError(f"a state has no node of kind {kind!r}")

    def _class(self, name: str) -> Any:
        """The class of that name, which the method must know: nothing is imported."""
        kinds = [sys.modules.get(kind.__module__) for kind in type(self.method).__mro__]
        found = [kind for kind in self.method.state_types if kind.__name__ == name]
        found += [vars(module)[name] for module in kinds if module and name in vars(module)]
        for kind in found:
            if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Directions)):
                return kind
        raise ConfigError(
            f"the state holds a {name}, which {type(self.method).__name__} does not know: define "
            "the class in the method's module, or name it in state_types"
        )
