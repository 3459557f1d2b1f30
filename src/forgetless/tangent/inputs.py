"""The inputs of a network's linear and convolutional layers, as matrices, and their moments."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any, final

import torch
from torch import Tensor, nn

from forgetless.linalg import add_product, float64, mirrored, product_with_itself
from forgetless.support.validation import ConfigError
from forgetless.tangent.blocks import Patches
from forgetless.tangent.capture import Convolution, window_of
from forgetless.tangent.evaluation import Batch, Evaluation, ParameterUses, call_with, eval_mode

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# A few samples show how much memory one takes; then as many go at once as fit these bytes.
_FIRST, _MOST, _BYTES = 16, 512, 1 << 28
_ROWS = 1 << 14  # whose products are added up in single precision
# Of so many rows for each input, and in all, more hardly change a moment: then some are left out.
_ENOUGH, _AT_LEAST = 32, 1 << 14


def layer_inputs(
    module: nn.Module,
    values: Mapping[str, Tensor],
    batches: Sequence[Batch],
    *,
    names: Iterable[str] | None = None,
    present_mode: bool = False,
) -> dict[str, Tensor]:
    """The inputs that each weight multiplies: weight → A, (N, d), with outputs A Wᵀ + b.

    W is `weight.flatten(1)`, so d = `weight[0].numel()`. A has a row per sample and position:

    - `nn.Linear`: the vectors along the last dimension; tokens of a sequence are positions;
    - `nn.Conv1d`, `Conv2d`, `Conv3d`: the patches of the padded input that each output position
      sees, with channels first as in the weight. With g groups each group's patches are rows of
      their own, N = samples × positions × g.

    Rows of a layer that runs several times, of layers that share a weight, and of several batches
    are concatenated. Left out are weights of all other layers (embeddings, whose input is one-hot;
    norms; recurrent layers and `nn.MultiheadAttention`, which run without their parts; subclasses,
    which may compute something else) and of layers that did not run.

    Arguments:
        module: the network; neither it nor its buffers change.
        values: parameters and buffers, by name.
        batches: the samples; one forward pass each.
        names: the wanted weights; None for all.
        present_mode: whether modules keep their present train or eval modes; otherwise eval mode.
    """
    own = {id(p): name for name, p in module.named_parameters()}
    wanted = set(own.values()) if names is None else set(names)
    found: dict[str, list[Tensor]] = {name: [] for name in own.values() if name in wanted}
    handles = []
    for layer in module.modules():
        name = own.get(id(layer._parameters.get("weight")))
        if type(layer) in _LAYERS and name in found:
            hook = _noting(found[name])
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    buffers = {name: values.get(name, b).clone() for name, b in module.named_buffers()}
    try:
        with nullcontext() if present_mode else eval_mode(module), torch.no_grad():
            for batch in batches:
                call_with(module, {**values, **buffers}, batch.args, batch.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items() if parts}


def _noting(parts: list[Tensor]) -> Callable[..., None]:
    """A hook that adds a layer's inputs as a matrix."""

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parts.append(input_rows(layer, args[0] if args else kwargs["input"]))

    return note


@final
@dataclass(frozen=True)
class InputMoments:
    """The second moments of layers' inputs, in float64.

    Arguments:
        inputs: weight → A, the mean of x xᵀ over samples and positions, (d, d); with a bias a one
            is appended to the inputs.
        biases: weight → the bias that A includes.
        others: the parameters that were used in another way, such as those of norms and embeddings.
    """

    inputs: Mapping[str, Tensor]
    biases: Mapping[str, str]
    others: frozenset[str]

    @classmethod
    def of_seeds(cls, several: Sequence["InputMoments"]) -> "InputMoments":
        """The moments of S seeds of one network, with a leading dimension of S."""
        first = several[0]
        inputs = {name: torch.stack([one.inputs[name] for one in several]) for name in first.inputs}
        return cls(inputs, first.biases, first.others)


def input_moments(
    module: nn.Module,
    values: Mapping[str, Tensor],
    batches: Sequence[Batch],
    *,
    names: Sequence[str],
    moment: Callable[[Tensor], Tensor] | None = None,
) -> InputMoments:
    """The moments of the inputs that each weight multiplies, in eval mode.

    The rows are those of `layer_inputs`, some of them where there are very many. Nothing is asked
    of a sample alone, so samples may interact, as by the batch statistics of norms: they run in
    parts of equal size, as large as the memory allows.

    Arguments:
        module: the network; neither it nor its buffers change.
        values: parameters and buffers, by name.
        batches: the samples.
        names: the wanted parameters.
        moment: in place of `second_moment`; `moment_shape` for the shapes alone.
    """
    sums = _InputSums.of(module, names, moment or second_moment)
    buffers = {name: values.get(name, b).clone() for name, b in module.named_buffers()}
    values = {**values, **buffers}
    with eval_mode(module):
        evaluations = [
            Evaluation.at(module, values, names, batch, _no_scalar, lasting=True)
            for batch in batches
        ]
        samples = sum(one.n for one in evaluations)
        try:
            taken = sums.sample_bytes(evaluations[0].select(slice(0, _FIRST)))
            most = max(1, min(_MOST, _BYTES // taken))
            for one in evaluations:
                parts = torch.arange(one.n).tensor_split(ceil(one.n / most))
                for part in parts:
                    some = one.select(slice(int(part[0]), int(part[-1]) + 1))
                    sums.add(some, samples / some.n)
        except ValueError as error:  # from norms that need more than one sample
            raise ConfigError(f"the model does not run on these samples: {error}") from error
    return sums.moments()


def _no_scalar(outputs: Any) -> Tensor:
    raise NotImplementedError("the inputs of layers need no scalar of the outputs")


@final
@dataclass
class _InputSums:
    """Running sums over the layers of a network.

    Arguments:
        own: layer → the names of its weight and of the bias that only this weight has.
        moment: from rows x to Σ x xᵀ.
        sums: weight → Σ x xᵀ, and the number of rows.
        others: parameters that were used outside of these layers.
    """

    own: Mapping[nn.Module, Sequence[str]]
    moment: Callable[[Tensor], Tensor]
    sums: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls, module: nn.Module, names: Sequence[str], moment: Callable[[Tensor], Tensor]
    ) -> "_InputSums":
        """Of the layers with a wanted weight."""
        named, wanted = {id(p): name for name, p in module.named_parameters()}, set(names)
        pairs: dict[nn.Module, tuple[str | None, str | None]] = {}
        for layer in module.modules():
            if type(layer) in _LAYERS:
                both = (named.get(id(layer._parameters.get(of))) for of in ("weight", "bias"))
                weight, bias = (name if name in wanted else None for name in both)
                pairs[layer] = weight, bias
        distinct = set(pairs.values())
        own: dict[nn.Module, Sequence[str]] = {}
        for layer, (weight, bias) in pairs.items():
            # One ΔW with two biases, or one Δb with two weights, are no matrix [ΔW Δb].
            alone = sum(weight == w or bias == b for w, b in distinct) == 1
            if weight is not None:
                own[layer] = (weight,) if bias is None or not alone else (weight, bias)
        return cls(own, moment)

    @contextmanager
    def _watching(self, act: Callable[[nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
        """Let `act` have the input and output of every run of a layer."""

        def after(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            act(layer, (args[0] if args else kwargs["input"]).detach(), output)

        handles = [
            layer.register_forward_hook(after, prepend=True, with_kwargs=True) for layer in self.own
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def sample_bytes(self, evaluation: Evaluation) -> int:
        """The bytes that a sample takes on its way through the layers."""
        taken = 1

        def measure(layer: nn.Module, x: Tensor, output: Tensor) -> None:
            nonlocal taken
            taken += x.nbytes + 2 * output.nbytes

        with evaluation.running(), self._watching(measure):
            evaluation.outputs(evaluation.leaves())
        return ceil(taken / evaluation.n)

    def add(self, evaluation: Evaluation, passes: float) -> None:
        """Some samples, the inputs of one of so many forward passes."""
        leaves = evaluation.leaves()
        watched = ParameterUses(leaves)

        def begin(layer: nn.Module, args: object) -> None:
            watched.begin(self.own[layer])

        def add(layer: nn.Module, x: Tensor, output: Tensor) -> None:
            watched.end()
            with torch.no_grad():
                rows = input_rows(layer, x, row_step(x, layer, passes))
                weight, *bias = self.own[layer]
                if bias:
                    rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
                moment, count = self.moment(rows), len(rows)
            if weight in self.sums:
                known, before = self.sums[weight]
                moment, count = known.add_(moment), before + count
            self.sums[weight] = moment, count

        handles = [layer.register_forward_pre_hook(begin) for layer in self.own]
        try:
            with evaluation.running(), self._watching(add), watched:
                evaluation.outputs(leaves)
        finally:
            for handle in handles:
                handle.remove()
        self.others |= watched.elsewhere

    def moments(self) -> InputMoments:
        """The means."""
        inputs = {w: m / max(1, count) for w, (m, count) in self.sums.items()}
        inputs = {w: m for w, m in inputs.items() if w not in self.others}
        biases = {names[0]: names[1] for names in self.own.values() if len(names) > 1}
        biases = {w: b for w, b in biases.items() if w in inputs}
        return InputMoments(inputs, biases, frozenset(self.others))


@final
class MomentSum:
    """Σ_i x_i x_iᵀ of rows that come in parts, in float64.

    Up to so many of them are added up in their own precision, which spares a small network most of
    the time: a few hundred rows' product takes no longer than to convert it.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._part: Tensor | None = None
        self._rows = 0  # of which the part is

    def add(self, rows: Tensor) -> None:
        """More rows (N, d)."""
        rows = rows.float() if rows.element_size() < 4 else rows
        for some in rows.split(_ROWS):
            if self._rows + len(some) > _ROWS:
                self._flush()
            if self._part is None:
                self._part = rows.new_zeros(rows.shape[1], rows.shape[1])
            add_product(some, self._part)
            self._rows += len(some)

    def take(self) -> Tensor | None:
        """The sum so far, (d, d), which starts again; None if there was no row."""
        self._flush()
        total, self._total = self._total, None
        return total

    def _flush(self) -> None:
        if self._part is not None:
            part = float64(mirrored(self._part))
            self._total = part if self._total is None else self._total.add_(part)
            self._part, self._rows = None, 0


def second_moment(rows: Tensor) -> Tensor:
    """Σ_i x_i x_iᵀ of rows (N, d), in float64."""
    parts = (float64(product_with_itself(x)) for x in rows.split(_ROWS))
    return sum(parts, float64(rows.new_zeros(())))


def moment_shape(rows: Tensor) -> Tensor:
    """What `second_moment` will give, as a tensor on the device "meta", which has no data."""
    return torch.empty(2 * rows.shape[1:], dtype=torch.float64, device="meta")


def row_step(x: Tensor, layer: nn.Module, passes: float) -> int:
    """How many rows there are for each that is needed; odd, to meet all positions in turn."""
    if isinstance(layer, Convolution):
        rows = len(x) * prod(x.shape[2:]) // prod(layer.stride)
        width = prod(layer.kernel_size) * layer.in_channels
    else:
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
    step = int(passes * rows / max(_AT_LEAST, _ENOUGH * width))
    return max(1, step - 1 + step % 2)


def input_rows(layer: nn.Module, x: Tensor, every: int = 1) -> Tensor:
    """A layer's inputs as rows (N, d): vectors, or of a convolution (n · positions · g) patches.

    Arguments:
        layer: the layer.
        x: its inputs.
        every: of so many rows only one is made.
    """
    if not isinstance(layer, Convolution):
        return x.reshape(-1, x.shape[-1])[::every]
    space, window = len(layer.kernel_size), window_of(layer)
    if x.dim() == space + 1:  # a single sample
        x = x.unsqueeze(0)
    outputs = window.patches(x[:1]).shape[2 : 2 + space]
    if every > 1 and layer.groups == 1:
        rows = torch.arange(0, len(x) * prod(outputs), every, device=x.device)
        sample, *place = torch.unravel_index(rows, (len(x), *outputs))
        return window.patches(x).movedim(1, 1 + space)[(sample, *place)].flatten(1)
    patches = Patches(x.unsqueeze(1), layer.groups, window, prod(outputs)).dense()
    return patches.movedim(1, 2).flatten(0, 2)[::every]
