"""What storing a task will cost, before anything runs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from forgetless.guard.batches.loading import TaskData
from forgetless.guard.batches.outputs import logits_of
from forgetless.guard.batches.samples import Part, StoredSamples, Unpack
from forgetless.guard.model import GuardedModel
from forgetless.guard.state import chosen_storage
from forgetless.linalg import float64
from forgetless.methods import Method
from forgetless.methods.cost import TaskProbe, Work
from forgetless.subspace import Storage
from forgetless.support.memory import shortage_of
from forgetless.support.validation import format_bytes
from forgetless.tangent import eval_mode

_TRIED = 64  # samples that an estimate runs
_OWN = 20  # times that a guarded step reads or writes all weights besides the method
# Sizes at which a machine's speed is measured: of products, eigenvalue problems, and copies.
_PRODUCT, _EIGEN, _COPY = 512, 256, 1 << 22
_RUNS = 3  # other processes disturb a single one


@final
@dataclass(frozen=True)
class Estimate:
    """What `end_task` will cost; None where it is unknown.

    Arguments:
        storage: the way of storing, in words.
        bytes: the least and the most that all tasks take afterwards, without the drift check's
            samples; equal where they follow from the shapes of the layers.
        peak: bytes beside the model and its activations while the task is stored, about.
        seconds: of `end_task`, an estimate.
        step_seconds: what a step takes longer afterwards, roughly, if all directions are protected.
        shortage: why the memory will not suffice; "" if it will.
        notes: what the numbers rest on.
    """

    storage: str
    bytes: tuple[int, int] | None
    peak: int | None
    seconds: float | None
    step_seconds: float | None
    shortage: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.bytes is None:
            return "\n".join(["the cost of storing the task is unknown", *self.notes])
        least, most = self.bytes
        size = format_bytes(most) if least == most else f"at most {format_bytes(most)}"
        lines = [f"{size} after the task, {self.storage}"]
        lines += [] if self.peak is None else [f"  at the peak: about {format_bytes(self.peak)}"]
        if self.seconds is not None:
            lines.append(f"  end_task: about {self.seconds:.2g} s")
        if self.step_seconds is not None:
            lines.append(f"  every step after it: roughly {1e3 * self.step_seconds:.2g} ms")
        return "\n".join([*lines, *([self.shortage] if self.shortage else []), *self.notes])


def working_device(device: torch.device) -> torch.device:
    """Where a model would run: on its device; one without weights ("meta") on this machine's."""
    if device.type != "meta":
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@final
class Speed:
    """The speed of a model on its device, measured as it is asked for.

    Of a model without weights, on the device "meta", the multiplications of a pass are counted.

    Arguments:
        model: the model.
        samples: a few samples.
    """

    def __init__(self, model: GuardedModel, samples: StoredSamples) -> None:
        self._model = model
        self._samples = samples
        parameters = model.parameters
        self._counts = parameters.device.type == "meta"
        place = working_device(parameters.device)
        self._like = torch.empty(0, dtype=parameters.dtype, device=place)

    def seconds(self, work: Work) -> float:
        """How long some work takes, about."""
        kinds: dict[str, Callable[[], float]] = {
            "passes": self._of_pass,
            "products": self._of_product,
            "cubes": self._of_cube,
            "bytes": self._of_byte,
        }
        amounts = {kind: getattr(work, kind) for kind in kinds}
        taken = [amount * kinds[kind]() for kind, amount in amounts.items() if amount]
        return float(sum(taken))

    def _of_pass(self) -> float:
        """One sample forward and backward."""
        theta = self._model.parameters.read()

        def run() -> Tensor:
            return self._model.gradient(self._samples, theta, self._sum)

        with eval_mode(self._model.module):
            if self._counts:
                with FlopCounterMode(display=False) as counter:
                    run()
                taken = float(counter.get_total_flops()) / 2 * self._of_product()
            else:
                taken = self._timed(run)
        return taken / len(self._samples)

    def _sum(self, outputs: Any, part: Part) -> Tensor:
        """A number with a gradient in all outputs, or in those that the user chose."""
        chosen = self._model.output
        if not callable(chosen):
            return logits_of(outputs).sum()
        target = () if part.target is None else (part.target,)
        return chosen(outputs, *target).sum()

    def _of_product(self) -> float:
        square = self._ones(_PRODUCT, _PRODUCT)
        return self._timed(lambda: square @ square, _RUNS) / _PRODUCT**3

    def _of_cube(self) -> float:
        square = float64(self._ones(_EIGEN, _EIGEN))
        square = square / (1 + torch.arange(_EIGEN).to(square))
        square = square + square.mT
        return self._timed(lambda: torch.linalg.eigh(square)[0], _RUNS) / _EIGEN**3

    def _of_byte(self) -> float:
        row = self._ones(_COPY)
        return self._timed(lambda: row + row, _RUNS) / (2 * row.nbytes)

    def _ones(self, *shape: int) -> Tensor:
        return self._like.new_ones(shape)

    def _timed(self, act: Callable[[], Tensor], runs: int = 1) -> float:
        """Seconds of the fastest of some runs after a first one; `float` waits for a GPU."""
        act()
        float(act().sum())
        taken = []
        for _ in range(runs):
            began = perf_counter()
            float(act().sum())
            taken.append(perf_counter() - began)
        return min(taken)


def estimated(
    data: Any,
    model: GuardedModel,
    method: Method[Any],
    storage: Storage,
    *,
    tasks: int,
    stored: int,
    unpack: Unpack | None,
    budget: int | None,
    chooses: bool,
) -> Estimate:
    """What storing one more task will cost.

    Arguments:
        data: of the task, as a loader gives it; None if there is none.
        model: the model.
        method: the method.
        storage: how it stores directions, unless it is chosen by the data.
        tasks: how many are stored.
        stored: their bytes.
        unpack: from a batch to inputs and target.
        budget: bytes for directions; None without a limit.
        chooses: whether the budget chooses the storage.
    """
    size = sample_bytes = samples = None
    if data is not None:
        task = TaskData(data, unpack, torch.Generator())
        size, few = task.known_size, task.few(_TRIED)
        sample_bytes = sum(t.nbytes for t in few.named().values()) // len(few)
        samples = StoredSamples((few,))
    if chooses and samples is not None:
        phi = model.features(StoredSamples((few.mapped(lambda t: t[:4]),)))
        storage = replace(chosen_storage(phi, method), max_rank=storage.max_rank)
    parameters = model.parameters
    probe = TaskProbe(
        tasks,
        stored,
        parameters.layout,
        parameters.empty().element_size(),
        storage,
        size,
        sample_bytes,
        lambda: model.moment_shapes(samples),
        None if samples is None else lambda: model.features(samples),
        None if samples is None else lambda: model.input_shapes(samples),
    )
    cost = method.cost(probe)
    words = str(storage) if method.demand() is not None else method.label
    if cost is None:
        name = type(method).__name__
        reason = f"{name} does not say what it stores (Method.cost)"
        known = type(method).cost is not Method.cost or method.demand() is not None
        if known:
            missing = "data" if data is None else "data whose size is known"
            reason = f"{name} needs {missing} for that"
        return Estimate(words, None, None, None, None, notes=(reason,))
    least, most = cost.least, cost.most
    if budget is not None and most > budget:
        least, most = 0, budget
    speed = None if samples is None else Speed(model, samples)
    # What is stored already is not free.
    needed, device = cost.peak - probe.stored, working_device(parameters.device)
    own = Work(bytes=_OWN * probe.vector if method.protects else 0)
    notes = [] if data is not None else ["without data every layer counts as used, on its own"]
    if parameters.device.type == "meta" and speed is not None:
        notes.append("without weights: seconds are multiplications at this machine's speed")
    if size is None:
        notes.append("the number of samples is unknown: the method's most are counted")
    return Estimate(
        words,
        (least, most),
        cost.peak,
        None if speed is None else speed.seconds(cost.storing),
        None if speed is None else speed.seconds(cost.step) + speed.seconds(own),
        shortage_of("storing the task", needed, device),
        tuple(notes),
    )
