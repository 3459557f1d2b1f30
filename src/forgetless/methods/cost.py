"""What storing a task costs: a method says it before anything runs."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import final

from forgetless.linalg import Layout
from forgetless.subspace import Storage
from forgetless.subspace.eigenbasis import Eigenbasis
from forgetless.subspace.storage import Demand, Footprint
from forgetless.tangent import InputMoments, Moments, TangentFeatures

# Passes over all energies in the search for a threshold.
_THRESHOLDS = 1000
# Products of rows with rows in orthonormalising: two rounds of two, in float64.
_ORTHONORMALISE = 8


@final
@dataclass(frozen=True)
class Work:
    """Amounts of work, of which a machine's speed makes seconds.

    Arguments:
        passes: samples that go forward and backward through the network.
        products: multiplications in products of matrices.
        cubes: Σ d³ over the eigenvalue problems of d × d matrices.
        bytes: bytes of memory that are read or written outside of these.
    """

    passes: float = 0
    products: float = 0
    cubes: float = 0
    bytes: float = 0


@final
@dataclass(frozen=True)
class Cost:
    """The cost of storing one more task.

    Arguments:
        least, most: bytes that all tasks take afterwards; equal if they follow from shapes.
        peak: bytes beside the model while the task is stored, about; activations come on top.
        storing: the work of `consolidate`.
        step: the most work of one `update` afterwards.
    """

    least: int
    most: int
    peak: int
    storing: Work = Work()
    step: Work = Work()


@final
@dataclass(frozen=True)
class TaskProbe:
    """What is known of the model and the next task before it is stored.

    Arguments:
        tasks: stored so far.
        stored: their bytes.
        layout: the protected weights.
        itemsize: bytes of one number of a vector (p,).
        storage: how directions are stored.
        size: training samples of the task; None if unknown.
        sample_bytes: bytes of one sample, as in the first batch; None without data.
        moments: the shapes of the Kronecker moments, as tensors without data.
        features: φ of a few samples; None without data.
        inputs: the shapes of the layers' input moments, likewise; None without data.
    """

    tasks: int
    stored: int
    layout: Layout
    itemsize: int
    storage: Storage
    size: int | None
    sample_bytes: int | None
    moments: Callable[[], Moments]
    features: Callable[[], TangentFeatures] | None
    inputs: Callable[[], InputMoments] | None

    @property
    def vector(self) -> int:
        """Bytes of one vector (p,)."""
        return self.layout.size * self.itemsize

    def drawn(self, count: int) -> int:
        """How many samples a random choice of `count` has."""
        return count if self.size is None else min(count, self.size)


def cost_of_directions(probe: TaskProbe, demand: Demand) -> Cost | None:
    """The cost of rows or factored samples; None if it takes data, and there are none.

    Samples whose features depend on others add nothing, so the bytes are a bound.
    """
    if probe.features is not None:
        needs = Footprint.of(probe.features(), demand, tasks=probe.tasks + 1)
    elif probe.storage.kind == "dense":
        size = probe.layout.size
        needs = Footprint(demand, size, probe.itemsize, 0.0, tasks=probe.tasks + 1)
    else:
        return None
    n, new, k = demand.samples, demand.directions, needs.directions
    most = needs.bytes(probe.storage)
    gram = 12 * n * n if demand.combined or probe.storage.kind == "factored" else 0
    rows = new * probe.vector if probe.storage.kind == "dense" else 0
    together = new * n if demand.combined else 0  # rows are sums of samples
    size = rows // (probe.itemsize * max(1, new))
    products = (
        n * n * needs.factored / probe.itemsize + (together + _ORTHONORMALISE * new * k) * size
    )
    # Sums of samples take a second pass.
    work = Work(2 * n if demand.combined else n, products, bytes=24 * gram + rows)
    # Rows are written where they stay, unless they are stored in another way than computed.
    converted = probe.storage.dtype is not None or probe.storage.device is not None
    peak = probe.stored + most + gram + (rows if converted else 0)
    return Cost(probe.stored, most, peak, work, Work(bytes=2 * most))


def cost_of_eigenbasis(probe: TaskProbe, samples: int, vectors: int) -> Cost:
    """The cost of a Kronecker eigenbasis and some vectors (p,).

    Without data every layer counts with inputs of its own, though some may share theirs.
    """
    moments = probe.moments()
    stored = Eigenbasis.numbers_of(moments) * probe.itemsize + vectors * probe.vector
    sides = [*moments.outputs.values(), *moments.inputs.values()]
    widths = [len(m) for m in sides if m.dim() == 2]
    products = 0
    for weight, outputs in moments.outputs.items():
        r, c = len(outputs), len(moments.inputs[moments.source[weight]])
        products += 2 * r * c * (c + (r if outputs.dim() == 2 else 0))
    sums = sum(m.numel() for m in (*sides, *moments.squares.values()))
    peak = probe.stored + stored + 8 * sums + 32 * max(widths, default=0) ** 2
    # The products of inputs, and of gradients, take about as long as the pass itself.
    passes = 2 * probe.drawn(samples)
    work = Work(passes, cubes=sum(d**3 for d in widths), bytes=_THRESHOLDS * probe.vector)
    return Cost(stored, stored, peak, work, Work(products=products))


def cost_of_inputs(probe: TaskProbe, samples: int, *, all_vectors: bool) -> Cost | None:
    """The cost of directions of layers' inputs, of which one to all are stored.

    Arguments:
        samples: the most samples of a task.
        all_vectors: whether every eigenvector is stored, protected or not.
    """
    if probe.inputs is None:
        return None
    moments = probe.inputs().inputs
    widths = {name: len(moment) for name, moment in moments.items()}
    # Vectors (d, k) with their energies, one number for the rest, and λ.
    most = sum(d * d + 2 * d + 1 for d in widths.values())
    least = sum((d * d + d if all_vectors else d + 1) + 2 for d in widths.values())
    cubes = sum(d**3 for d in widths.values())
    squares = sum(d * d for d in widths.values())
    peak = probe.stored + most * probe.itemsize + 8 * squares
    peak += 48 * max(widths.values(), default=0) ** 2
    step = sum(2 * prod(probe.layout.shapes[name]) * d for name, d in widths.items())
    work = Work(probe.drawn(samples), 4 * cubes, cubes)
    least = max(least * probe.itemsize, probe.stored)
    return Cost(least, most * probe.itemsize, peak, work, Work(products=step))
