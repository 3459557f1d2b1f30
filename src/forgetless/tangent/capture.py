"""One forward and one backward pass: the per-sample gradients of every parameter, as blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot
from typing import final

import torch
from torch import Tensor, nn

from forgetless.linalg import float64
from forgetless.tangent.blocks import Block, Outer, Rows
from forgetless.tangent.factors import merged
from forgetless.tangent.fallback import VMAP_ERRORS, gradients_of, rows_by_loop, rows_by_vmap
from forgetless.tangent.problem import Problem
from forgetless.tangent.rules import RULES, Contribution, matrix_shape

# The ways a rule is tried: samples in the leading dimension, samples in the second.
_AXES = (0, 1)


@final
@dataclass(frozen=True)
class Captured:
    """The blocks of every parameter for each of the K scalars, and which rule holds them."""

    blocks: tuple[Mapping[str, Block], ...]
    rules: Mapping[str, str]


@final
@dataclass(frozen=True)
class _Call:
    """One run of a layer: what its rule keeps of the input (None: no rule), and its output."""

    layer: nn.Module
    names: Mapping[str, str]  # parameter within the layer → its name in the network
    kept: Tensor | None
    output: Tensor


@final
@dataclass(frozen=True)
class _Truth:
    """Gradients of Σ_ik w_ik s_ik by autograd, with random weights w, to check any rows against.

    Samples do not interact, so the gradient is Σ_ik w_ik φ_ik however the network lays its samples
    out. A rule that took other things for samples (time steps, say) gives a different sum for all
    w but a set of measure zero.
    """

    weights: Tensor  # (n, K)
    gradients: Mapping[str, Tensor | None]
    lengths: Mapping[str, float]  # of the gradients
    # Some gradients are zero but for rounding (of the keys' bias in attention): the rounding of
    # everything else is their measure.
    rounding: float
    eps: float  # of the coarsest precision in which a layer computed

    def confirms(self, name: str, blocks: list[Block]) -> bool:
        """Whether the blocks (one a scalar) of a parameter give that sum, up to rounding."""
        return name in self.confirmed({name: blocks})

    def confirmed(self, several: Mapping[str, list[Block]]) -> list[str]:
        """The parameters whose blocks it confirms; a GPU is asked once for all."""
        errors = _numbers([self._error(name, blocks) for name, blocks in several.items()])
        share = min(0.1, 20 * self.eps**0.5)
        return [
            name
            for name, error in zip(several, errors, strict=True)
            if error <= share * self.lengths[name] + self.rounding
        ]

    def _error(self, name: str, blocks: list[Block]) -> Tensor:
        found = self.weights.new_zeros(1, blocks[0].size)
        for block, weights in zip(blocks, self.weights.T, strict=True):
            block.add_combined(weights.unsqueeze(0), found)
        if (gradient := self.gradients[name]) is not None:
            found = found - gradient.reshape(1, -1)
        error: Tensor = found.norm()
        return error


def _numbers(scalars: list[Tensor]) -> list[float]:
    """Scalars of one device as numbers, brought over together."""
    found: list[float] = torch.stack([float64(s) for s in scalars]).tolist() if scalars else []
    return found


def capture(problem: Problem, given_up: frozenset[str] = frozenset()) -> Captured:
    """Every parameter's per-sample gradients: by its layer's rule if it holds, else by rows.

    Samples do not interact, so ∂(Σ_i s_i)/∂z_i = ∂s_i/∂z_i: one backward pass for all samples, K
    of them for K scalars. No rule is believed before its rows, weighted at random and summed, are
    what autograd finds.

    Arguments:
        given_up: parameters for which no rule is tried.
    """
    leaves = problem.leaves()
    calls: list[_Call] = []
    with problem.running():
        handles = _watch(problem, given_up, calls)
        try:
            scalars = problem.scalars(leaves)
        finally:
            for handle in handles:
                handle.remove()
        truth = _truth(scalars, leaves, calls)
        deltas = _output_gradients(scalars, calls)
        del scalars
        blocks, rules = _by_rules(problem, calls, deltas, truth)
        calls.clear()  # and with them the graph
        rest = tuple(name for name in problem.names if name not in rules)
        if rest:
            by_rows, more = _by_rows(problem, rest, truth)
            blocks = [{**a, **b} for a, b in zip(blocks, by_rows, strict=True)]
            rules |= more
    return Captured(tuple(blocks), {name: rules[name] for name in problem.names})


def _watch(
    problem: Problem, given_up: frozenset[str], calls: list[_Call]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that write down every run of a layer that has a rule and a wanted parameter."""
    wanted = set(problem.names) - given_up
    called = {id(p): name for name, p in problem.module.named_parameters()}
    handles = []
    for layer in problem.module.modules():
        if type(layer) not in RULES:
            continue
        known = RULES[type(layer)].labels  # a hook may have given it others (weight_norm)
        own = [(kind, called[id(p)]) for kind, p in layer.named_parameters(recurse=False)]
        names = {kind: name for kind, name in own if name in wanted and kind in known}
        if not names:
            continue

        def remember(
            layer: nn.Module,
            args: tuple[Tensor, ...],
            kwargs: dict[str, Tensor],
            output: Tensor,
            names: Mapping[str, str] = names,
        ) -> Tensor:
            x = args[0] if args else kwargs["input"]
            with torch.no_grad():
                kept = RULES[type(layer)].keep(layer, x.detach())
            if output.requires_grad:
                calls.append(_Call(layer, names, kept, output))
            return output.clone()  # the activation after it may work in place

        handles.append(layer.register_forward_hook(remember, with_kwargs=True))
    return handles


def _truth(scalars: Tensor, leaves: Mapping[str, Tensor], calls: list[_Call]) -> _Truth:
    generator = torch.Generator().manual_seed(len(scalars))
    weights = torch.rand(scalars.shape, generator=generator) + 0.5
    weights *= torch.randint(0, 2, scalars.shape, generator=generator) * 2 - 1
    weights = weights.to(scalars)
    gradients = gradients_of((weights * scalars).sum(), leaves)
    there = {name: g for name, g in gradients.items() if g is not None}
    lengths = dict.fromkeys(gradients, 0.0)
    lengths |= zip(there, _numbers([g.norm() for g in there.values()]), strict=True)
    eps = max(torch.finfo(t.dtype).eps for t in (weights, *(call.output for call in calls)))
    return _Truth(weights, gradients, lengths, 30 * eps * hypot(*lengths.values()), eps)


def _output_gradients(scalars: Tensor, calls: list[_Call]) -> list[list[Tensor]]:
    """δ of every call, for each of the K scalars."""
    outputs = [call.output for call in calls]
    if not outputs or not scalars.requires_grad:
        return [[torch.zeros_like(z) for z in outputs] for _ in scalars.T]
    found = []
    for column in scalars.sum(0):
        gradients = torch.autograd.grad(column, outputs, retain_graph=True, allow_unused=True)
        pairs = zip(gradients, outputs, strict=True)
        found.append([torch.zeros_like(z) if g is None else g for g, z in pairs])
    return found


def _by_rules(
    problem: Problem, calls: list[_Call], deltas: list[list[Tensor]], truth: _Truth
) -> tuple[list[dict[str, Block]], dict[str, str]]:
    """The blocks that a rule gives and autograd confirms, and the rules' names."""
    touched = {name for call in calls for name in call.names.values()}
    found: list[dict[str, Block]] = [{} for _ in deltas]
    rules: dict[str, str] = {}
    for name in problem.names:
        if name not in touched and truth.gradients[name] is None:
            value = problem.values[name]
            none = Outer((1, 1, value.numel()), (), value.new_empty(problem.n, 0))
            for blocks in found:
                blocks[name] = none
            rules[name] = "unused"
    for axis in _AXES:
        built = [_build(problem, calls, of, axis, set(rules)) for of in deltas]
        labels = _labels(calls)
        candidates = {
            name: [blocks[name] for blocks in built]
            for name in labels
            if all(name in blocks for blocks in built)
        }
        for name in truth.confirmed(candidates):
            for blocks, block in zip(found, candidates[name], strict=True):
                blocks[name] = block
            rules[name] = labels[name]
    return found, rules


def _labels(calls: list[_Call]) -> dict[str, str]:
    """Parameter name → the rules that hold it, joined where several layers share it."""
    labels: dict[str, set[str]] = {}
    for call in calls:
        for kind, name in call.names.items():
            labels.setdefault(name, set()).add(RULES[type(call.layer)].labels[kind])
    return {name: "+".join(sorted(several)) for name, several in labels.items()}


def _build(
    problem: Problem,
    calls: list[_Call],
    deltas: list[Tensor],
    axis: int,
    done: set[str],
) -> dict[str, Block]:
    """The blocks of one scalar, if the samples are where `axis` says."""
    parts: dict[str, list[Contribution | None]] = {}
    shapes: dict[str, set[tuple[int, int, int]]] = {}
    for call, delta in zip(calls, deltas, strict=True):
        wanted = {kind: name for kind, name in call.names.items() if name not in done}
        if not wanted:
            continue
        rule = RULES[type(call.layer)]
        # A layer that computes in lower precision (autocast) hands over less than its weights hold.
        like = problem.values[next(iter(wanted.values()))]
        kept = call.kept if call.kept is None else _as_precise(call.kept, like)
        given = kept is not None and rule.contributions(
            call.layer, kept, _as_precise(delta, like), problem.n, axis
        )
        for kind, name in wanted.items():
            parts.setdefault(name, []).append(given[kind] if given else None)
            shape = problem.values[name].shape
            shapes.setdefault(name, set()).add(matrix_shape(call.layer, shape))
    blocks: dict[str, Block] = {}
    for name, several in parts.items():
        uses = [part for part in several if isinstance(part, tuple)]
        rows = [part for part in several if isinstance(part, Tensor)]
        if len(uses) == len(several) and len(shapes[name]) == 1:
            like = problem.values[name].new_empty(problem.n, 0)
            blocks[name] = Outer(next(iter(shapes[name])), tuple(merged(uses)), like)
        elif len(rows) == len(several):
            blocks[name] = Rows(rows[0] if len(rows) == 1 else torch.stack(rows).sum(0))
    return blocks


def _as_precise(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype) if values.is_floating_point() else values


def _by_rows(
    problem: Problem, names: tuple[str, ...], truth: _Truth
) -> tuple[list[dict[str, Block]], dict[str, str]]:
    """Rows by vmap where it can and autograd confirms them, else by a loop over samples."""
    count = truth.weights.shape[1]
    found: list[dict[str, Block]] = [{} for _ in range(count)]
    rules = dict.fromkeys(names, "loop")
    try:
        by_vmap = rows_by_vmap(problem, names, count)
    except VMAP_ERRORS:
        by_vmap = []
    for name in names if by_vmap else ():
        blocks: list[Block] = [Rows(rows[name]) for rows in by_vmap]
        if truth.confirms(name, blocks):
            for column, block in zip(found, blocks, strict=True):
                column[name] = block
            rules[name] = "vmap"
    rest = tuple(name for name in names if rules[name] == "loop")
    if rest:
        for column, rows in zip(found, rows_by_loop(problem, rest, count), strict=True):
            column.update({name: Rows(rows[name]) for name in rest})
    return found, rules
