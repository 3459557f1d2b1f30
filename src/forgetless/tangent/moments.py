"""Second moments of per-sample gradients, as Kronecker products where the layer allows.

The gradient of a layer's weight is Σ_t δ_t a_tᵀ over positions t, with inputs a and gradients δ at
the layer's outputs. K-FAC (Martens and Grosse 2015; for positions, Grosse and Martens 2016) takes δ
and a, and different positions, for independent:

    Σ_i vec(g_i) vec(g_i)ᵀ ≈ G ⊗ A,    G = Σ_i Σ_t δ δᵀ,    A = the mean of a aᵀ

One forward pass and one backward pass for each scalar of a sample give both; no gradient of a
single sample is computed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, final

import torch
from torch import Tensor, nn

from forgetless.linalg import float64
from forgetless.support.collectives import Ranks
from forgetless.support.files import json_tensor, json_value
from forgetless.support.memory import free_memory, require_memory
from forgetless.support.progress import advance
from forgetless.support.validation import ConfigError, format_bytes
from forgetless.tangent.capture import RULES, Convolution, refuse_interacting
from forgetless.tangent.evaluation import Batch, Evaluation, ParameterUses, Product, Scalar
from forgetless.tangent.features import features_of
from forgetless.tangent.inputs import MomentSum, input_rows, row_step

# A few samples show how much memory one takes; then as many go at once as fit these bytes.
_FIRST, _BYTES = 16, 1 << 28
_MOST = {"cpu": 512, "cuda": 8192}
# Outputs of a larger layer, such as those over a vocabulary, have the diagonal alone.
_LARGEST = 1 << 12
_MIXED = 0.1  # share of labels that `mixed_likelihood` draws from all classes alike
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


@final
@dataclass(frozen=True)
class Moments:
    """The moments of a network's parameters, sums over the samples, in float64.

    Arguments:
        outputs: weight (r, c) → G, (r, r), or its diagonal (r,): of an embedding, whose δ is
            one-hot, and of very many outputs.
        inputs: weight → A, (c, c); with a bias (c + 1, c + 1), a one appended to the inputs.
        source: weight → the weight whose A it has: itself, or the first one with the same inputs.
        biases: weight → the name of the bias that A includes.
        squares: every other parameter → Σ_i g_i², in its shape.
        samples: how many there are.
        squared_scalars: Σ s² over the scalars whose gradients these are, ().
        embeddings: the weights whose δ is one-hot, so that A is of the gradients.
    """

    outputs: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    source: Mapping[str, str]
    biases: Mapping[str, str]
    squares: Mapping[str, Tensor]
    samples: int
    squared_scalars: Tensor
    embeddings: frozenset[str] = frozenset()

    @property
    def covered(self) -> set[str]:
        """The parameters whose moments these are."""
        return {*self.outputs, *self.biases.values(), *self.squares}

    @classmethod
    def of_seeds(cls, several: Sequence["Moments"]) -> "Moments":
        """The moments of S seeds of one network, with a leading dimension of S."""
        first = several[0]

        def stacked(side: Callable[["Moments"], Mapping[str, Tensor]]) -> dict[str, Tensor]:
            return {name: torch.stack([side(one)[name] for one in several]) for name in side(first)}

        sides = stacked(lambda one: one.outputs), stacked(lambda one: one.inputs)
        squares = stacked(lambda one: one.squares)
        scalars = torch.stack([one.squared_scalars for one in several])
        names = first.source, first.biases
        return cls(*sides, *names, squares, first.samples, scalars, first.embeddings)

    def shrunk(self, share: float) -> "Moments":
        """With each layer's moment of gradients pulled towards the identity, for S seeds.

            G ← (1 − ρ) G + ρ tr(G) / r · I

        Arguments:
            share: ρ.
        """
        outputs = {
            name: g if name in self.embeddings else _shrunk(g, share)
            for name, g in self.outputs.items()
        }
        inputs = {
            name: _shrunk(a, share) if name in self.embeddings else a
            for name, a in self.inputs.items()
        }
        return replace(self, outputs=outputs, inputs=inputs)


def kronecker_moments(
    module: nn.Module,
    values: Mapping[str, Tensor],
    batches: Sequence[Batch],
    scalar: Scalar,
    *,
    names: Sequence[str],
    ranks: Ranks | None = None,
    in_place: bool = False,
) -> Moments:
    """The moments of the gradients of K scalars per sample, summed over the K.

    Linear layers, convolutions without groups, embeddings and the projections of self-attention in
    `nn.MultiheadAttention` have Kronecker factors, with the bias of the same layer. A weight that
    several layers share has one product for the sum of theirs, with its trace. Every other
    parameter has its exact diagonal.

    Arguments:
        module: the network, in eval mode (a sample's output must not depend on the others).
        values: its parameters and buffers, by name.
        batches: the samples, in parts whose shapes may differ.
        scalar: from outputs and targets of n samples to (n,) or (n, K).
        names: the wanted parameters.
        ranks: processes that each have some of the samples; the moments are those of all.
        in_place: the module gathers its parameters from the processes by itself, and `values` are
            its own. Then each of them is given all samples and takes its share, all in equally many
            passes, and parameters that need gradients of single samples are left out.
    """
    first, *others = batches
    evaluation = Evaluation.at(
        module, values, names, first, scalar, lasting=True, in_place=in_place
    )
    refuse_interacting(evaluation)
    sums = _Sums(evaluation, sum(map(len, batches)))
    sharing = ranks if in_place else None
    for part in (evaluation, *map(evaluation.on, others)):
        sums.add_all(part, sharing)
    if ranks is not None:
        sums.add_up(ranks)
    found = sums.moments()
    rest = [name for name in names if name not in found.covered]
    if not rest or in_place:
        return found
    phi = features_of(module, values, batches, scalar, names=rest, lasting=True)
    total = float64(phi.squared_sum())
    total = total if ranks is None else ranks.sum(total)
    squares = {name: total[columns].view_as(values[name]) for name, columns in phi.columns()}
    return replace(found, squares={**found.squares, **squares})


def moment_shapes(
    module: nn.Module,
    values: Mapping[str, Tensor],
    batch: Batch | None,
    scalar: Scalar,
    *,
    names: Sequence[str],
) -> Moments:
    """What `kronecker_moments` will give, as tensors on the device "meta", which have no data.

    Arguments:
        batch: a few samples, whose forward pass shows which layers run and share their inputs;
            None counts every layer with inputs of its own.
        module, values, scalar, names: as of `kronecker_moments`.
    """
    some = Batch((), {}, ()) if batch is None else batch
    evaluation = Evaluation.at(module, values, names, some, scalar, lasting=True)
    sums = _Sums(evaluation, 1)
    layers = {*sums.uses}
    if batch is not None:
        layers = sums.run(evaluation)
    for layer in layers & {*sums.uses}:
        sums.uses[layer].take_shapes()
    found = sums.moments()
    covered = {*found.outputs, *found.biases.values()}
    rest = [name for name in names if name not in covered]
    return replace(found, squares={name: _shape_only(values[name].shape) for name in rest})


def _shape_only(shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.float64, device="meta")


def probed(outputs: Tensor, signs: Tensor) -> Tensor:
    """Σ_k ξ_k s_k with random signs ξ: (n, K), (n, K) → (n,).

    The mean of its moments over the signs is the sum of those of the K scalars.
    """
    return (outputs * signs).sum(1)


def drawn_likelihood(
    logits: Tensor, uniform: Tensor, counted: Tensor | None = None, *, mixed: float = 0.0
) -> Tensor:
    """The log-likelihood of labels that the model draws, whose moments are the Fisher matrix.

    Arguments:
        logits: (n, …, C).
        uniform: a random number in [0, 1) for each label, (n, …).
        counted: which labels count, (n, …) of bool; None for all.
        mixed: share of the labels that are drawn from all classes alike.

    Returns:
        (n,), summed over a sample's labels.
    """
    logs = torch.log_softmax(logits, -1)
    shares = (1 - mixed) * logs.detach().exp() + mixed / logits.shape[-1]
    below = shares.cumsum(-1) < uniform.to(logs).unsqueeze(-1)
    label = below.sum(-1, keepdim=True).clamp_max(logits.shape[-1] - 1)
    chosen = logs.gather(-1, label).squeeze(-1)
    chosen = chosen if counted is None else chosen * counted
    return chosen.flatten(1).sum(1) if chosen.dim() > 1 else chosen


def mixed_likelihood(logits: Tensor, uniform: Tensor, counted: Tensor | None = None) -> Tensor:
    """As `drawn_likelihood`, one label in ten of any class, so that no class goes unseen.

    A model that is certain draws no label but its own, so the Fisher matrix of what it has learned
    is nearly zero. Of a sequence the moments are the mean over its labels, as a loss is.
    """
    found = drawn_likelihood(logits, uniform, counted, mixed=_MIXED)
    labels = uniform[0].numel() if counted is None else counted.flatten(1).sum(1).clamp_min(1)
    return found / labels**0.5


@final
class _Use:
    """Running sums of one layer that uses a weight."""

    def __init__(self, layer: nn.Module, weight: str, bias: str) -> None:
        self.layer = layer
        self.weight = weight
        self.bias = bias
        self.outputs: Tensor | None = None
        self.inputs: Tensor | None = None
        self._of_outputs, self._of_inputs = MomentSum(), MomentSum()  # until `finish`
        self.mean: Tensor | None = None
        self.count = 0  # positions
        self.source = self  # the use that has the inputs' sums

    @property
    def is_embedding(self) -> bool:
        """Whether δ is one-hot, and the gradients at the outputs take the place of a."""
        return isinstance(self.layer, nn.Embedding)

    def add_inputs(self, x: Tensor, passes: float) -> None:
        """The inputs of one of so many forward passes; of an embedding, its tokens."""
        if isinstance(self.layer, nn.Embedding):
            counts = torch.bincount(x.flatten(), minlength=self.layer.num_embeddings).double()
            if self.layer.padding_idx is not None:
                counts[self.layer.padding_idx] = 0
            self.outputs = _plus(self.outputs, counts)
            self.count += int(counts.sum())
        elif self.source is self:
            rows = input_rows(self.layer, x, row_step(x, self.layer, passes))
            self._of_inputs.add(rows)
            self.mean = _plus(self.mean, float64(rows.sum(0)))
            self.count += len(rows)

    def add_deltas(self, x: Tensor, delta: Tensor) -> None:
        """The gradients of a backward pass at the outputs; all rows, since G is their sum."""
        if isinstance(self.layer, Convolution):
            delta = delta.movedim(-1 - len(self.layer.kernel_size), -1)
        rows = delta.reshape(-1, delta.shape[-1])
        if isinstance(self.layer, nn.Embedding):
            if self.layer.padding_idx is not None:
                rows = rows[x.flatten() != self.layer.padding_idx]
            self._of_inputs.add(rows)
        elif rows.shape[1] > _LARGEST:
            self.outputs = _plus(self.outputs, float64(rows.square().sum(0)))
        else:
            self._of_outputs.add(rows)

    def finish(self) -> None:
        """Let `outputs` and `inputs` be the sums over all samples; there come no more."""
        outputs, inputs = self._of_outputs.take(), self._of_inputs.take()
        self.outputs = self.outputs if outputs is None else outputs
        self.inputs = self.inputs if inputs is None else inputs

    def add_up(self, ranks: Ranks) -> None:
        """Replace the sums by those over all processes."""
        of_outputs, of_inputs = self.shapes
        device = self.matrix.device
        self.count = int(ranks.sum(torch.tensor(self.count)))
        self.outputs = ranks.sum(_or_zeros(self.outputs, of_outputs, device))
        if self.source is self:
            self.inputs = ranks.sum(_or_zeros(self.inputs, of_inputs, device))
        if self.source is self and not self.is_embedding:
            self.mean = ranks.sum(_or_zeros(self.mean, of_inputs[:1], device))

    @property
    def matrix(self) -> Tensor:
        """The layer's weight; of self-attention that of its three projections."""
        own: Any = self.layer._parameters
        found: Tensor = own.get("weight", own.get("in_proj_weight"))
        return found

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those of the sums over outputs and inputs."""
        r, *rest = self.matrix.shape
        c = prod(rest)
        return ((r,) if self.is_embedding or r > _LARGEST else (r, r)), (c, c)

    def take_shapes(self) -> None:
        """Sums without data."""
        self.outputs, self.inputs = map(_shape_only, self.shapes)
        self.mean = None if self.is_embedding else self.inputs[0]
        self.count = 1

    @property
    def is_used(self) -> bool:
        """Whether a gradient went through the layer."""
        own = self.source
        return self.outputs is not None and own.inputs is not None and own.count > 0

    def sides(self, with_bias: bool) -> tuple[Tensor, Tensor] | None:
        """G and A; None if no gradient went through the layer."""
        own = self.source
        if self.outputs is None or own.inputs is None or not own.count:
            return None
        if not with_bias or own.mean is None:
            return self.outputs, own.inputs / own.count
        c = len(own.mean)
        inputs = own.inputs.new_ones(c + 1, c + 1)
        torch.div(own.inputs, own.count, out=inputs[:c, :c])
        inputs[c, :c] = inputs[:c, c] = own.mean / own.count
        return self.outputs, inputs


def _or_zeros(total: Tensor | None, shape: Sequence[int], device: torch.device) -> Tensor:
    return float64(torch.zeros(*shape, device=device)) if total is None else total


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total.add_(more)


@final
@dataclass(frozen=True)
class _Run:
    """One run of a layer."""

    layer: nn.Module
    x: Tensor
    output: Tensor

    @property
    def place(self) -> tuple[object, ...]:
        """What two inputs that are the same tensor have in common, while both exist."""
        x = self.x  # on the device "meta" it has a storage and no address
        address = (x.untyped_storage()._cdata, x.storage_offset()) if x.is_meta else x.data_ptr()
        return address, x.shape, x.stride()


@final
class _Sums:
    """The sums of all layers of a network.

    Arguments:
        evaluation: of the first samples; its `names` are the wanted parameters.
        samples: how many there are in all.
    """

    def __init__(self, evaluation: Evaluation, samples: int) -> None:
        self.samples = samples
        names = {id(p): name for name, p in evaluation.module.named_parameters()}
        wanted = set(evaluation.names)
        self.own: dict[nn.Module, dict[str, str]] = {}  # layer → its parameters' names
        self.uses: dict[nn.Module, _Use] = {}
        self.bare: dict[str, nn.Module] = {}  # weight → the part of attention that it belongs to
        self.places = {  # module → its own wanted parameters
            module: {
                kind: names[id(p)]
                for kind, p in module._parameters.items()
                if names.get(id(p)) in wanted
            }
            for module in evaluation.module.modules()
        }
        for layer in evaluation.module.modules():
            if type(layer) is nn.MultiheadAttention:
                # It runs `linear` by itself, with its own weight and that of a part.
                for part, kind in (layer, "in_proj_"), (layer.out_proj, ""):
                    weight, bias = (
                        names.get(id(part._parameters.get(kind + of)), "")
                        for of in ("weight", "bias")
                    )
                    if weight in wanted:
                        self.uses[part] = _Use(part, weight, bias if bias in wanted else "")
                        self.bare[weight] = part
            if type(layer) not in RULES:
                continue
            found = {kind: names[id(p)] for kind, p in layer.named_parameters(recurse=False)}
            own = {kind: name for kind, name in found.items() if name in wanted}
            if type(layer) in _LAYERS and "weight" in own and _has_factors(layer):
                self.uses[layer] = _Use(layer, own["weight"], own.get("bias", ""))
                self.own[layer] = own
            elif type(layer) not in _LAYERS and own:
                self.own[layer] = own
        for use in self.uses.values():
            _check_fits(use, evaluation)
        self.shapes = {name: evaluation.values[name].shape for name in wanted}
        self.scales: dict[str, Tensor] = {}  # parameter of a norm → Σ_i g_i²
        self.elsewhere: set[str] = set()  # used outside of their layers, or of unknown samples
        self.seen = 0
        self.given = 0  # those of all processes, counted when a shape is done
        self.has_begun = False
        self.squared_scalars = torch.zeros((), dtype=torch.float64)
        self.sample_bytes = 1
        self.device = next(iter(evaluation.values.values())).device
        self.most = _MOST.get(self.device.type, _MOST["cpu"])

    def fitting(self) -> int:
        """How many samples go through the network at once."""
        return max(1, min(self.most, _BYTES // self.sample_bytes)) if self.has_begun else _FIRST

    def run(self, evaluation: Evaluation) -> set[nn.Module]:
        """The layers that run on some samples, with inputs shared as these show."""
        runs: list[_Run] = []
        with evaluation.running():
            self._forward(evaluation, runs)
        self._share_inputs(runs)
        return {run.layer for run in runs}

    def add_all(self, part: Evaluation, sharing: Ranks | None) -> None:
        """All samples of one shape.

        Arguments:
            part: the samples.
            sharing: processes that take turns and run the network together, so that one whose
                samples are used up runs another's and does not count it; None if all are its own.
        """
        start, rank, ranks = 0, 0, 1
        if sharing is not None:
            rank, ranks = (sharing.rank - self.given) % sharing.size, sharing.size
        while start < part.n:
            stop = min(part.n, start + ranks * self.fitting())
            mine = slice(start + rank, stop, ranks)
            if start + rank < stop:
                self.add(part.select(mine))
            else:
                self.add(part.select(slice(start, start + 1)), counts=False)
            if sharing is not None:
                self.sample_bytes = int(sharing.broadcast(torch.tensor(self.sample_bytes)))
            start = stop
            advance("moments", min(self.samples, ranks * self.seen), self.samples)
        self.given += part.n

    def add(self, evaluation: Evaluation, *, counts: bool = True) -> None:
        """Some samples; if they do not count, the network is only run."""
        runs: list[_Run] = []
        with evaluation.running():
            scalars = self._forward(evaluation, runs)
            self._share_inputs(runs)
            self._check_memory(runs)
            for run in runs if counts else ():
                if run.layer in self.uses:
                    self.uses[run.layer].add_inputs(run.x, self.samples / evaluation.n)
            outputs = [run.output for run in runs]
            columns = scalars.sum(0) if outputs and scalars.requires_grad else ()
            for k, column in enumerate(columns):
                more = k + 1 < scalars.shape[1]
                deltas = torch.autograd.grad(
                    column, outputs, retain_graph=more, materialize_grads=True
                )
                if counts:
                    self._add_deltas(runs, deltas, evaluation.n)
        self.has_begun = True
        if counts:
            self.seen += evaluation.n
            self.squared_scalars += float64(scalars.detach()).square().sum().cpu()
        taken = sum(run.x.nbytes + 2 * run.output.nbytes for run in runs) // evaluation.n
        self.sample_bytes = max(self.sample_bytes, taken)

    def _forward(self, evaluation: Evaluation, runs: list[_Run]) -> Tensor:
        """The scalars, on the way to which every run of a layer is noted."""
        leaves = evaluation.leaves()

        def of_attention(part: nn.Module) -> Product:
            use = self.uses[part]
            return Product(
                (use.weight, use.bias),
                lambda x, output: runs.append(_Run(part, x.detach(), output)),
            )

        watched = ParameterUses(leaves, {w: of_attention(part) for w, part in self.bare.items()})

        def begin(layer: nn.Module, args: object) -> None:
            watched.begin(self.own[layer].values())

        def end(
            layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
        ) -> Tensor:
            watched.end()
            if output.requires_grad:
                x = args[0] if args else kwargs["input"]
                runs.append(_Run(layer, x.detach(), output))
            return output.clone()  # the activation after it may work in place

        def gathered(module: nn.Module, args: object) -> None:
            here = {name: module._parameters[kind] for kind, name in self.places[module].items()}
            watched.learn({name: tensor for name, tensor in here.items() if tensor is not None})

        handles = []
        if evaluation.in_place:
            handles = [module.register_forward_pre_hook(gathered) for module in self.places]
        for layer in self.own:
            handles.append(layer.register_forward_pre_hook(begin))
            # Innermost: what a user's own hooks do is not part of the layer's run.
            handles.append(layer.register_forward_hook(end, prepend=True, with_kwargs=True))
        try:
            with watched:
                return evaluation.scalars(leaves)
        finally:
            self.elsewhere |= watched.elsewhere
            for handle in handles:
                handle.remove()

    def _check_memory(self, runs: Sequence[_Run]) -> None:
        """Reject a network whose moments together fit no memory, before they take any."""
        if self.has_begun:
            return
        uses = {self.uses[run.layer] for run in runs if run.layer in self.uses}
        numbers = sum(
            prod(use.shapes[0]) + (prod(use.shapes[1]) if use.source is use else 0) for use in uses
        )
        require_memory("the sum of all layers' moments", 8 * numbers, self.device)

    def _share_inputs(self, runs: Sequence[_Run]) -> None:
        """Let linear layers that always have the same inputs share their sums."""
        places: dict[_Use, list[object]] = {}
        for run in runs:
            if isinstance(run.layer, nn.Linear) and run.layer in self.uses:
                places.setdefault(self.uses[run.layer], []).append(run.place)
        first: dict[object, _Use] = {}
        for use, inputs in places.items():
            source = first.setdefault((bool(use.bias), *inputs), use)
            if not self.has_begun:
                use.source = source
            elif use.source is not use and use.source is not source:
                raise ConfigError(
                    f"{use.weight} and {use.source.weight} have the same inputs for some samples "
                    "and not for others, so their moments cannot be told apart"
                )

    def _add_deltas(self, runs: Sequence[_Run], deltas: Sequence[Tensor], n: int) -> None:
        """The gradients of one scalar of n samples."""
        rows: dict[str, Tensor] = {}
        for run, delta in zip(runs, deltas, strict=True):
            if run.layer in self.uses:
                self.uses[run.layer].add_deltas(run.x, delta)
                continue
            rule = RULES[type(run.layer)]
            kept = rule.keep(run.layer, run.x)
            found = None if kept is None else rule.contributions(run.layer, kept, delta, n, 0)
            for kind, name in self.own[run.layer].items():
                of_samples = None if found is None else found[kind]
                if isinstance(of_samples, Tensor):
                    rows[name] = _plus(rows.get(name), of_samples)
                else:
                    self.elsewhere.add(name)
        for name, summed in rows.items():
            squares = float64(summed.square().sum(0)).view(self.shapes[name])
            self.scales[name] = _plus(self.scales.get(name), squares)

    def add_up(self, ranks: Ranks) -> None:
        """Replace the sums by those over all processes, which all have the same network."""
        notes = {
            "elsewhere": sorted(self.elsewhere),
            "sources": {use.weight: use.source.weight for use in self.uses.values()},
        }
        every = [json_value(row) for row in ranks.gather(json_tensor(notes))]
        if any(one["sources"] != notes["sources"] for one in every):
            raise ConfigError(
                "layers have the same inputs in some processes and not in others, so their "
                "moments cannot be told apart"
            )
        self.elsewhere = {name for one in every for name in one["elsewhere"]}
        for use in self.uses.values():
            use.finish()
            use.add_up(ranks)
        for layer, own in self.own.items():
            for name in () if layer in self.uses else own.values():
                known = self.scales.get(name)
                self.scales[name] = ranks.sum(_or_zeros(known, self.shapes[name], self.device))
        self.seen = int(ranks.sum(torch.tensor(self.seen)))
        self.squared_scalars = ranks.sum(self.squared_scalars)

    def moments(self) -> Moments:
        """The sums so far; parameters that need gradients of single samples are missing."""
        of_weight: dict[str, list[_Use]] = {}
        for use in self.uses.values():
            use.finish()
        for use in self.uses.values():
            if use.weight not in self.elsewhere and use.is_used:
                of_weight.setdefault(use.weight, []).append(use)
        # A bias counts as an input of its weight, unless another layer has it too.
        owners = Counter(use.bias for use in self.uses.values())
        outputs, inputs, source, biases = {}, {}, {}, {}
        for weight, uses in of_weight.items():
            bias = uses[0].bias
            joined = bool(bias) and owners[bias] == len(uses) == 1 and bias not in self.elsewhere
            if joined:
                biases[weight] = bias
            source[weight] = weight
            first = uses[0].source.weight
            if len(uses) == 1 and first in source and (first in biases) == joined:
                source[weight] = first
            g = uses[0].outputs
            if g is not None and source[weight] != weight:
                outputs[weight] = g
                continue
            sides = [found for use in uses if (found := use.sides(joined)) is not None]
            outputs[weight], inputs[weight] = _one_product(sides)
        squares = {n: s for n, s in self.scales.items() if n not in self.elsewhere}
        one_hot = [name for name, uses in of_weight.items() if all(u.is_embedding for u in uses)]
        return Moments(
            outputs,
            inputs,
            source,
            biases,
            squares,
            self.seen,
            self.squared_scalars,
            frozenset(one_hot),
        )


def _shrunk(moment: Tensor, share: float) -> Tensor:
    """(1 − ρ) M + ρ tr(M) / d · I of moments (S, d, d), or of diagonals (S, d)."""
    diagonal = moment if moment.dim() == 2 else moment.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(1, keepdim=True)
    if moment.dim() == 2:
        return (1 - share) * moment + share * mean
    found = (1 - share) * moment
    found.diagonal(dim1=1, dim2=2).add_(share * mean)
    return found


def _check_fits(use: _Use, evaluation: Evaluation) -> None:
    """Reject a layer with so many inputs that their moments fit no memory."""
    weight = evaluation.values[use.weight]
    inputs = weight[0].numel()
    # In float64, and a product of a part of the samples beside it.
    needed = inputs**2 * (8 + weight.element_size())
    free = free_memory(weight.device)
    if needed > free:
        raise ConfigError(
            f"{use.weight} has {inputs:,} inputs, whose moments take {format_bytes(needed)}, and "
            f"{format_bytes(int(free))} of memory are free: leave it out with exclude=, or use "
            "PCAOGD"
        )


def _one_product(sides: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Σ_u G_u ⊗ A_u as one product of the same trace."""
    if len(sides) == 1:
        return sides[0]
    if any(g.dim() == 1 for g, _ in sides):
        sides = [(g if g.dim() == 1 else g.diagonal(), a) for g, a in sides]
    lengths = [a.trace().clamp_min(torch.finfo(a.dtype).tiny) for _, a in sides]
    g = torch.stack([g * length for (g, _), length in zip(sides, lengths, strict=True)])
    energies = g.flatten(1).sum(1) if g.dim() == 2 else g.diagonal(dim1=1, dim2=2).sum(1)
    shares = energies / energies.sum().clamp_min(torch.finfo(g.dtype).tiny)
    a = [share * a / length for share, (_, a), length in zip(shares, sides, lengths, strict=True)]
    return g.sum(0), torch.stack(a).sum(0)


def _has_factors(layer: nn.Module) -> bool:
    """Whether it is one matrix, and its forward pass does not change it."""
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None
    return not isinstance(layer, Convolution) or layer.groups == 1
