"""First layers that never change: what they make of a sample is computed once, not every step."""

import copy
from collections import OrderedDict
from typing import final

import torch
from torch import Tensor, nn
from torch.func import vmap

from forgetless.data import Split
from forgetless.tangent.evaluation import call_with
from forgetless.training.fast.perceptron import is_chain, links
from forgetless.training.network import Network

# Samples of all seeds together that go through the frozen layers at once.
_CHUNK = {"cpu": 1024, "cuda": 1 << 15}
_MOST_BYTES = 1 << 31  # of their outputs that are kept


@final
class FrozenStart:
    """A network cut in two: layers that do not change, and a network of all the others.

    Arguments:
        network: a whole network. Its frozen layers are used in eval mode.
        start: its first modules, none of which is trained, by name.
        rest: the others, by name.
    """

    def __init__(
        self, network: Network, start: dict[str, nn.Module], rest: dict[str, nn.Module]
    ) -> None:
        def of(module: nn.Module) -> dict[str, Tensor]:
            names = [n for n, _ in (*module.named_parameters(), *module.named_buffers())]
            return {n: network.fixed[n] for n in names if n in network.fixed}

        self.module = nn.Sequential(OrderedDict(start))
        self.values = of(self.module)
        self.seeds = network.seeds
        self.rest = copy.copy(network)  # with the same theta, not a copy of it
        self.rest.module = nn.Sequential(OrderedDict(rest))
        self.rest.fixed = of(self.rest.module)
        self.rest.perceptron = network.perceptron_in(self.rest.module)
        self.rest.by_seed = network.runs_by_seed(self.rest.module)

    def can_keep(self, split: Split) -> bool:
        """Whether there is room for the outputs of all samples."""
        one = self._run(self._inputs(split, torch.zeros(1, dtype=torch.long)))
        return one.nbytes * len(split) <= _MOST_BYTES

    def outputs(self, split: Split) -> Split:
        """The samples as the rest of the network sees them."""
        device = split.labels.device.type
        rows = max(1, _CHUNK.get(device, _CHUNK["cpu"]) // self.seeds)
        parts = [self._run(self._inputs(split, i)) for i in torch.arange(len(split)).split(rows)]
        return Split(torch.cat(parts, 1), split.labels, per_seed=True)

    def _inputs(self, split: Split, index: Tensor) -> Tensor:
        return split.take(index.to(split.labels.device).expand(self.seeds, -1))[0]

    def _run(self, inputs: Tensor) -> Tensor:
        """(S, n, *) → (S, n, *)."""

        def one(values: dict[str, Tensor], x: Tensor) -> Tensor:
            outputs: Tensor = call_with(self.module, values, (x,))
            return outputs

        self.module.eval()
        with torch.no_grad():
            if self.seeds == 1:
                return one({n: v[0] for n, v in self.values.items()}, inputs[0]).unsqueeze(0)
            return vmap(one)(self.values, inputs)


def frozen_start(network: Network) -> FrozenStart | None:
    """The network cut behind its frozen first layers, if it is a chain that begins with some."""
    if not is_chain(network.module):
        return None
    start: dict[str, nn.Module] = {}
    rest: dict[str, nn.Module] = {}
    for name, child in links(network.module):
        trained = any(f"{name}.{n}" in network.shapes for n, _ in child.named_parameters())
        (rest if rest or trained or not _is_known(child) else start)[name] = child
    if not any(True for child in start.values() for _ in child.parameters()) or not rest:
        return None
    return FrozenStart(network, start, rest)


def _is_known(module: nn.Module) -> bool:
    """Whether PyTorch made all of it, so that in eval mode it does the same every time."""
    return all(type(m).__module__.startswith("torch.nn.modules.") for m in module.modules())


@final
class Front:
    """What is trained and asked: a network, or once that is cut, what is behind its frozen start.

    Arguments:
        whole: the network.
    """

    def __init__(self, whole: Network) -> None:
        self.network = whole
        self._start = frozen_start(whole)
        self._latest: tuple[Split, Split] | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the frozen start has been cut off."""
        return self._start is not None and self.network is self._start.rest

    def cut(self) -> None:
        """Leave out the frozen start from now on."""
        if self._start is not None:
            self.network = self._start.rest
            self.network.module.eval()

    def seen(self, split: Split, *, may_cut: bool) -> Split:
        """The samples as the network sees them, which may be cut if that saves work."""
        if self._start is None:
            return split
        if not self.is_cut:
            if not may_cut:
                return split
            if not self._start.can_keep(split):
                self._start = None
                return split
            self.cut()
        if self._latest is None or self._latest[0] is not split:
            self._latest = split, self._start.outputs(split)
        return self._latest[1]
