"""Per-sample gradients of every parameter from one forward and one backward pass, by rules.

A rule takes δ = ∂f/∂z, the gradient at a layer's output, with all samples of a chunk in one
tensor, and returns the contribution of each parameter: a pair of factors or rows. It assumes that
samples are the leading dimension (`axis` 0: n, or n times something, sample by sample) or the
second one (`axis` 1); `capture` checks whether that is true. A layer of another type, such as a
language model's own norm, is run again for each sample by itself, from its input and δ.
"""

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from forgetless.support.validation import ConfigError
from forgetless.tangent.blocks import (
    Block,
    Dense,
    Left,
    OneHot,
    Outer,
    Patches,
    Right,
    Rows,
    Window,
    joined_uses,
)
from forgetless.tangent.evaluation import (
    VMAP_ERRORS,
    AutogradCheck,
    Evaluation,
    ParameterUses,
    autograd_check,
    close,
    gradients_of,
    rows_by_loop,
    rows_by_vmap,
)

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
Contribution = tuple[Left, Right] | Tensor  # factors (n, g, T, ·), or rows (n, size)
Contributions = Mapping[str, Contribution]  # by the parameter's name within the layer

_NORM = {"weight": "norm", "bias": "norm"}
_INTERACT = (
    "a sample's outputs depend on the other samples of a batch, so it has no gradient of its own"
)
# Each rule is tried with samples in the first dimension, then in the second.
_AXES = (0, 1)
# Samples that autograd is asked about, where all layers show which dimension may be the samples'.
_CHECKED = 2


@final
@dataclass(frozen=True)
class Rule:
    """How the gradients of one type of layer are computed.

    Arguments:
        labels: parameter within the layer → the rule's label in `TangentFeatures.rules`.
        keep: (layer, input) → what is needed of the input; None if the rule does not apply.
        contributions: (layer, kept, δ, n, axis) → each parameter's contribution; None if the
            shapes do not fit.
    """

    labels: Mapping[str, str]
    keep: Callable[..., "Tensor | _Inputs | None"]
    contributions: Callable[..., Contributions | None]


def _keep_input(layer: nn.Module, x: Tensor) -> Tensor | None:
    return x


def _by_sample(values: Tensor, n: int, axis: int, features: int) -> Tensor | None:
    """(n, T, *features) from values whose last `features` dimensions are not positions."""
    leading = values.dim() - features
    if axis == 0 and leading >= 1 and values.shape[0] % n == 0:
        return values.reshape(n, -1, *values.shape[leading:])
    if axis == 1 and leading >= 2 and values.shape[1] == n:
        return values.transpose(0, 1).reshape(n, -1, *values.shape[leading:])
    return None


def _linear(layer: nn.Linear, x: Tensor, delta: Tensor, n: int, axis: int) -> Contributions | None:
    left, right = _by_sample(delta, n, axis, 1), _by_sample(x, n, axis, 1)
    if left is None or right is None:
        return None
    bias = left.sum(1) if left.shape[1] > 1 else left[:, 0]
    return {"weight": (Dense(left.unsqueeze(1)), Dense(right.unsqueeze(1))), "bias": bias}


def window_of(layer: Convolution) -> Window:
    """The geometry of a convolution's patches."""
    return Window(
        tuple(layer.kernel_size),
        tuple(layer.stride),
        tuple(layer.dilation),
        tuple(layer._reversed_padding_repeated_twice),
        "constant" if layer.padding_mode == "zeros" else layer.padding_mode,
    )


def _convolution(
    layer: Convolution, x: Tensor, delta: Tensor, n: int, axis: int
) -> Contributions | None:
    images = _by_sample(x, n, axis, len(layer.kernel_size) + 1)
    deltas = _by_sample(delta.flatten(2), n, axis, 2)  # (n, k, out, outputs)
    if axis == 1 or images is None or deltas is None or x.dim() != len(layer.kernel_size) + 2:
        return None
    k, outputs = deltas.shape[1], deltas.shape[3]
    right = Patches(images, layer.groups, window_of(layer), k * outputs)
    left = deltas.unflatten(2, (layer.groups, -1)).permute(0, 2, 1, 4, 3).flatten(2, 3)
    return {"weight": (Dense(left), right), "bias": deltas.sum((1, 3))}


def _keep_tokens(layer: nn.Embedding, x: Tensor) -> Tensor | None:
    # max_norm rewrites the weight during the forward pass.
    return x if layer.max_norm is None else None


def _embedding(
    layer: nn.Embedding, x: Tensor, delta: Tensor, n: int, axis: int
) -> Contributions | None:
    index, deltas = _by_sample(x, n, axis, 0), _by_sample(delta, n, axis, 1)
    if index is None or deltas is None:
        return None
    index = index.long()
    if layer.padding_idx is not None:
        deltas = deltas.masked_fill((index == layer.padding_idx).unsqueeze(-1), 0)
    return {"weight": (OneHot(index, layer.num_embeddings), Dense(deltas.unsqueeze(1)))}


def _keep_normalized(layer: nn.LayerNorm | nn.GroupNorm | _BatchNorm, x: Tensor) -> Tensor | None:
    """The layer's output before weight and bias: x̂."""
    if isinstance(layer, nn.LayerNorm):
        return functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return functional.group_norm(x, layer.num_groups, eps=layer.eps)
    if layer.training or layer.running_mean is None or layer.running_var is None:
        return None
    return functional.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)


def _layer_norm(
    layer: nn.LayerNorm, x_hat: Tensor, delta: Tensor, n: int, axis: int
) -> Contributions | None:
    features = len(layer.normalized_shape)
    weight = _by_sample(delta * x_hat, n, axis, features)
    bias = _by_sample(delta, n, axis, features)
    if weight is None or bias is None:
        return None
    return {"weight": weight.sum(1).flatten(1), "bias": bias.sum(1).flatten(1)}


def _channel_norm(
    layer: nn.Module, x_hat: Tensor, delta: Tensor, n: int, axis: int
) -> Contributions | None:
    if axis == 1 or len(delta) % n:
        return None
    channels = delta.shape[1]

    def summed(values: Tensor) -> Tensor:
        return values.reshape(n, -1, channels, prod(values.shape[2:])).sum((1, 3))

    return {"weight": summed(delta * x_hat), "bias": summed(delta)}


@final
@dataclass(frozen=True)
class _Inputs:
    """The input of a layer without a rule of its own, and its parameters and buffers then."""

    x: Tensor
    values: Mapping[str, Tensor]


def _keep_all(layer: nn.Module, x: Tensor) -> _Inputs:
    own = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return _Inputs(x, {name: value.detach() for name, value in own.items()})


def _alone(
    layer: nn.Module, kept: _Inputs, delta: Tensor, n: int, axis: int
) -> Contributions | None:
    """Each sample's vector-Jacobian product with the layer alone."""
    x = kept.x
    if any(t.dim() <= axis or t.shape[axis] != n for t in (x, delta)):
        return None
    parameters = {name: kept.values[name] for name, _ in layer.named_parameters()}

    def product(parameters: dict[str, Tensor], x: Tensor, delta: Tensor) -> Tensor:
        values = {**kept.values, **parameters}
        output: Tensor = functional_call(layer, values, (x.unsqueeze(axis),))
        return (output.squeeze(axis) * delta).sum()

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about slow batching rules
            found = vmap(grad(product), in_dims=(None, axis, axis))(parameters, x, delta)
    except VMAP_ERRORS:
        return None
    return {name: rows.reshape(n, -1) for name, rows in found.items()}


_CONVOLUTION = Rule({"weight": "conv", "bias": "bias"}, _keep_input, _convolution)
_CHANNEL_NORM = Rule(_NORM, _keep_normalized, _channel_norm)

# Exact types only: a subclass may do something else in its forward.
RULES: Mapping[type[nn.Module], Rule] = {
    nn.Linear: Rule({"weight": "linear", "bias": "bias"}, _keep_input, _linear),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.Embedding: Rule({"weight": "embedding"}, _keep_tokens, _embedding),
    nn.LayerNorm: Rule(_NORM, _keep_normalized, _layer_norm),
    nn.GroupNorm: _CHANNEL_NORM,
    nn.BatchNorm1d: _CHANNEL_NORM,
    nn.BatchNorm2d: _CHANNEL_NORM,
    nn.BatchNorm3d: _CHANNEL_NORM,
}


def _rule_of(layer: nn.Module) -> Rule | None:
    """The rule of a layer's type, or of any layer with parameters and no layers inside."""
    if type(layer) in RULES or any(True for _ in layer.children()):
        return RULES.get(type(layer))
    own = [name for name, _ in layer.named_parameters()]
    return Rule(dict.fromkeys(own, "layer"), _keep_all, _alone) if own else None


def matrix_shape(layer: nn.Module, shape: torch.Size) -> tuple[int, int, int]:
    """A weight as g matrices r×c: (g, r, c)."""
    groups = layer.groups if isinstance(layer, Convolution) else 1
    return groups, shape[0] // groups, prod(shape[1:])


def refuse_interacting(evaluation: Evaluation) -> None:
    """Reject a network that gives two samples together other scalars than each alone."""
    two = evaluation.select(slice(0, 2))
    try:
        with evaluation.running(), torch.no_grad():
            together = two.scalars({})
            alone = [two.select(slice(i, i + 1)).scalars({}) for i in range(two.n)]
    except ValueError as error:  # from layers that need more than one sample
        raise ConfigError(f"{_INTERACT} ({error})") from error
    if bool(together.isfinite().all()) and not close(together, torch.cat(alone)):
        raise ConfigError(_INTERACT)


@final
@dataclass(frozen=True)
class SampleLayout:
    """The dimension of samples in each layer, confirmed by autograd for every parameter.

    Arguments:
        layers: in the order in which they run.
        axes: parameter → dimension of the samples; unused parameters are missing.
        rules: parameter → rule.
    """

    layers: tuple[nn.Module, ...]
    axes: Mapping[str, int]
    rules: Mapping[str, str]


@final
@dataclass(frozen=True)
class Captured:
    """The blocks of every parameter for each of the K scalars, and the rule they come from.

    Arguments:
        layout: None if some parameter has no rule.
    """

    blocks: tuple[Mapping[str, Block], ...]
    rules: Mapping[str, str]
    layout: SampleLayout | None = None


@final
@dataclass(frozen=True)
class _Call:
    """One run of a layer.

    Arguments:
        layer: the layer.
        rule: its rule.
        names: parameter within the layer → its name in the network.
        kept: what the rule keeps of the input; None if it does not apply.
        output: the layer's output.
    """

    layer: nn.Module
    rule: Rule
    names: Mapping[str, str]
    kept: Tensor | _Inputs | None
    output: Tensor


def capture(
    evaluation: Evaluation,
    given_up: frozenset[str] = frozenset(),
    layout: SampleLayout | None = None,
) -> Captured:
    """Every parameter's per-sample gradients, by its layer's rule if confirmed, else by rows.

    Samples do not interact, so ∂(Σ_i s_i)/∂z_i = ∂s_i/∂z_i: one backward pass for all samples, K
    passes for K scalars. A rule is used only if its rows, of a few samples, weighted at random and
    summed, agree with autograd, and if nothing outside the layer uses the parameter.

    Arguments:
        given_up: parameters for which no rule is tried.
        layout: of other samples that must agree with these; autograd is then not asked again.
    """
    leaves = evaluation.leaves()
    calls: list[_Call] = []
    uses = ParameterUses(leaves)
    with evaluation.running():
        handles = _watch(evaluation, given_up, calls, uses)
        try:
            with uses:
                scalars = evaluation.scalars(leaves)
        finally:
            for handle in handles:
                handle.remove()
        deltas = _output_gradients(scalars, calls)
        if layout is not None and layout.layers == tuple(call.layer for call in calls):
            blocks = [_laid_out(evaluation, calls, of, layout) for of in deltas]
            if all(len(of) == len(evaluation.names) for of in blocks):
                return Captured(tuple(blocks), layout.rules, layout)
        check = _check(evaluation, scalars, leaves, calls)
        # A layer without a rule of its own may have parameters that it does not use.
        touched = {n for c in calls if type(c.layer) in RULES for n in c.names.values()}
        unused = _unused(scalars, leaves, check, touched)
        del scalars
        blocks, rules, axes = _by_rules(evaluation, calls, deltas, check, uses.elsewhere, unused)
        layers = tuple(call.layer for call in calls)
        calls.clear()  # frees the graph
        rest = tuple(name for name in evaluation.names if name not in rules)
        if rest:
            by_rows, more = _by_rows(evaluation, rest, check)
            blocks = [{**a, **b} for a, b in zip(blocks, by_rows, strict=True)]
            rules |= more
    rules = {name: rules[name] for name in evaluation.names}
    return Captured(tuple(blocks), rules, None if rest else SampleLayout(layers, axes, rules))


def _check(
    evaluation: Evaluation, scalars: Tensor, leaves: Mapping[str, Tensor], calls: list[_Call]
) -> AutogradCheck:
    """The gradients of the first samples by autograd; of all, if layers see more than samples."""
    n, outputs = evaluation.n, [call.output for call in calls]
    plain = all(n in output.shape[: len(_AXES)] for output in outputs)
    if not plain or n <= _CHECKED:
        return autograd_check(scalars, leaves, outputs)
    few, leaves = evaluation.select(slice(0, _CHECKED)), evaluation.leaves()
    return autograd_check(few.scalars(leaves), leaves, outputs)


def _unused(
    scalars: Tensor, leaves: Mapping[str, Tensor], check: AutogradCheck, touched: Collection[str]
) -> list[str]:
    """The parameters on which no scalar depends, of those that no rule saw."""
    names = [name for name in leaves if name not in touched and check.gradients[name] is None]
    if len(check.weights) == len(scalars) or not names:
        return names
    found = gradients_of(scalars.sum(), {name: leaves[name] for name in names})
    return [name for name in names if found[name] is None]


def _laid_out(
    evaluation: Evaluation, calls: list[_Call], deltas: list[Tensor], layout: SampleLayout
) -> dict[str, Block]:
    """The blocks of one scalar, with the samples in the layout's dimensions."""
    unused = [name for name in evaluation.names if name not in layout.axes]
    blocks: dict[str, Block] = {name: _zero_block(evaluation, name) for name in unused}
    for axis in set(layout.axes.values()):
        others = {name for name, its in layout.axes.items() if its != axis}
        blocks |= _build(evaluation, calls, deltas, axis, others)
    return blocks


def _zero_block(evaluation: Evaluation, name: str) -> Block:
    """Gradients of zero."""
    value = evaluation.values[name]
    return Outer((1, 1, value.numel()), (), value.new_empty(evaluation.n, 0))


def _watch(
    evaluation: Evaluation, given_up: frozenset[str], calls: list[_Call], uses: ParameterUses
) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that record every run of a layer with a rule and a wanted parameter."""
    wanted, n = set(evaluation.names) - given_up, evaluation.n
    called = {id(p): name for name, p in evaluation.module.named_parameters()}
    handles = []
    for layer in evaluation.module.modules():
        rule = _rule_of(layer)
        if rule is None:
            continue
        known = rule.labels  # a hook may have added others (weight_norm)
        own = [(kind, called[id(p)]) for kind, p in layer.named_parameters(recurse=False)]
        names = {kind: name for kind, name in own if name in wanted and kind in known}
        if not names:
            continue

        def remember(
            layer: nn.Module,
            args: tuple[Tensor, ...],
            kwargs: dict[str, Tensor],
            output: Any,
            names: Mapping[str, str] = names,
            rule: Rule = rule,
        ) -> Any:
            uses.end()
            x = args[0] if args else kwargs.get("input")
            alone = type(layer) in RULES or (len(args) == 1 and not kwargs)
            if not alone or not isinstance(x, Tensor) or not isinstance(output, Tensor):
                uses.elsewhere |= {*names.values()}
                return output
            if type(layer) is nn.Embedding and len(x) == 1 and x.dim() > 1:
                # Positions, say, that all samples share: each sample gets a δ of its own.
                x = x.expand(n, *x.shape[1:])
                output = output.expand(n, *output.shape[1:])
            with torch.no_grad():
                kept = rule.keep(layer, x.detach())
            if output.requires_grad:
                calls.append(_Call(layer, rule, names, kept, output))
            return output.clone()  # the activation after it may work in place

        def begin(layer: nn.Module, args: Any, names: Mapping[str, str] = names) -> None:
            uses.begin(names.values())

        # Innermost: what a user's own hooks do is not part of the layer's run.
        handles.append(layer.register_forward_pre_hook(begin))
        handles.append(layer.register_forward_hook(remember, prepend=True, with_kwargs=True))
    return handles


def _output_gradients(scalars: Tensor, calls: list[_Call]) -> list[list[Tensor]]:
    """δ of every call, for each of the K scalars."""
    outputs = [call.output for call in calls]
    if not outputs or not scalars.requires_grad:
        return [[torch.zeros_like(z) for z in outputs] for _ in scalars.T]
    return [
        list(torch.autograd.grad(s, outputs, retain_graph=True, materialize_grads=True))
        for s in scalars.sum(0)
    ]


def _by_rules(
    evaluation: Evaluation,
    calls: list[_Call],
    deltas: list[list[Tensor]],
    check: AutogradCheck,
    elsewhere: Collection[str],
    unused: Collection[str],
) -> tuple[list[dict[str, Block]], dict[str, str], dict[str, int]]:
    """The blocks that autograd confirms, their rules' names and their samples' dimensions."""
    found: list[dict[str, Block]] = [{} for _ in deltas]
    rules: dict[str, str] = {}
    axes: dict[str, int] = {}
    for name in unused:
        for blocks in found:
            blocks[name] = _zero_block(evaluation, name)
        rules[name] = "unused"
    for axis in _AXES:
        built = [_build(evaluation, calls, of, axis, set(rules)) for of in deltas]
        labels = _labels(calls)
        candidates = {
            name: [blocks[name] for blocks in built]
            for name in labels
            if name not in elsewhere and all(name in blocks for blocks in built)
        }
        for name in check.confirmed(candidates):
            for blocks, block in zip(found, candidates[name], strict=True):
                blocks[name] = block
            rules[name], axes[name] = labels[name], axis
    return found, rules, axes


def _labels(calls: list[_Call]) -> dict[str, str]:
    """Parameter → its rule's label, or several joined by "+" if different layers share it."""
    labels: dict[str, set[str]] = {}
    for call in calls:
        for kind, name in call.names.items():
            labels.setdefault(name, set()).add(call.rule.labels[kind])
    return {name: "+".join(sorted(several)) for name, several in labels.items()}


def _build(
    evaluation: Evaluation,
    calls: list[_Call],
    deltas: list[Tensor],
    axis: int,
    done: set[str],
) -> dict[str, Block]:
    """The blocks of one scalar, with the samples in dimension `axis`."""
    parts: dict[str, list[Contribution | None]] = {}
    shapes: dict[str, set[tuple[int, int, int]]] = {}
    for call, delta in zip(calls, deltas, strict=True):
        wanted = {kind: name for kind, name in call.names.items() if name not in done}
        if not wanted:
            continue
        # Under autocast, inputs and δ have a lower precision than the weights.
        like = evaluation.values[next(iter(wanted.values()))]
        kept = _as_precise(call.kept, like) if isinstance(call.kept, Tensor) else call.kept
        given = kept is not None and call.rule.contributions(
            call.layer, kept, _as_precise(delta, like), evaluation.n, axis
        )
        for kind, name in wanted.items():
            part = given[kind] if given else None
            parts.setdefault(name, []).append(part)
            if isinstance(part, tuple):
                shape = evaluation.values[name].shape
                shapes.setdefault(name, set()).add(matrix_shape(call.layer, shape))
    blocks: dict[str, Block] = {}
    for name, several in parts.items():
        uses = [part for part in several if isinstance(part, tuple)]
        rows = [part for part in several if isinstance(part, Tensor)]
        if len(uses) == len(several) and len(shapes[name]) == 1:
            like = evaluation.values[name].new_empty(evaluation.n, 0)
            blocks[name] = Outer(next(iter(shapes[name])), tuple(joined_uses(uses)), like)
        elif len(rows) == len(several):
            blocks[name] = Rows(rows[0] if len(rows) == 1 else torch.stack(rows).sum(0))
    return blocks


def _as_precise(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype) if values.is_floating_point() else values


def _by_rows(
    evaluation: Evaluation, names: tuple[str, ...], check: AutogradCheck
) -> tuple[list[dict[str, Block]], dict[str, str]]:
    """Rows by vmap where that works and autograd confirms them, else by a loop over samples."""
    count = check.weights.shape[1]
    found: list[dict[str, Block]] = [{} for _ in range(count)]
    rules = dict.fromkeys(names, "loop")
    try:
        by_vmap = rows_by_vmap(evaluation, names, count)
    except VMAP_ERRORS:
        by_vmap = []
    for name in names if by_vmap else ():
        blocks: list[Block] = [Rows(rows[name]) for rows in by_vmap]
        if check.confirms(name, blocks):
            for column, block in zip(found, blocks, strict=True):
                column[name] = block
            rules[name] = "vmap"
    rest = tuple(name for name in names if rules[name] == "loop")
    if rest:
        by_loop = _by_loop(evaluation, rest, count)
        several: dict[str, list[Block]] = {n: [Rows(rows[n]) for rows in by_loop] for n in rest}
        if isfinite(check.rounding) and len(check.confirmed(several)) < len(rest):
            raise ConfigError(_INTERACT)
        for k, column in enumerate(found):
            column.update({name: blocks[k] for name, blocks in several.items()})
    return found, rules


def _by_loop(evaluation: Evaluation, names: tuple[str, ...], count: int) -> list[dict[str, Tensor]]:
    try:
        return rows_by_loop(evaluation, names, count)
    except ValueError as error:  # from layers that need more than one sample
        raise ConfigError(f"{_INTERACT} ({error})") from error
