"""Computes the reasons: a network's tangent features along the way that the run took."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from forgetless import theory
from forgetless.data import Scenario, Split
from forgetless.launch.rebuild import network_of, out_of_reach, samples_of, settings_of, tasks_of
from forgetless.report.analysis.analysis import Analysis, ForecastPoint, Images, Variance
from forgetless.report.analysis.images import Gallery
from forgetless.subspace import FACTORED, FactoredSubspace
from forgetless.support.errors import TraceError
from forgetless.support.validation import whole
from forgetless.tangent import TangentFeatures, tangent_features
from forgetless.theory.forecasting import margins
from forgetless.theory.linearised import widened
from forgetless.trace import Trace

SAMPLES = 200
_FOR_VARIANCE = 500  # samples whose directions are counted
_MOST_TASKS = 20  # every pair of them is looked at
_MOST_FORECASTS = 4
_RTOL = 3e-4  # singular values below this share of the largest are rounding of float32
_DIGITS = 5


def analyse(
    trace: Trace,
    *,
    data: Path | None = None,
    samples: int = SAMPLES,
    observer: Callable[[str], None] | None = None,
) -> Analysis:
    """Why the first finished seed of a run forgot.

    Needs the weights after each task in the trace and the data on disk; nothing is downloaded.

    Arguments:
        trace: of a run that `forgetless run` or `compare` made.
        data: folder to look for the data in first.
        samples: of each task, for overlaps and kernels.
        observer: told in words what is being done.
    """
    whole(2).check("samples", samples)
    tell = observer or (lambda what: None)
    tell("reading the tasks")
    journey = _Journey.of(trace, data, samples)
    tell("overlap and kernels")
    overlap, kernel = _pairs(journey)
    tell("explained variance")
    variance = [_variance(journey, s) for s in range(journey.learned)]
    gallery = Gallery(journey.tasks.input_shape)
    forecast = []
    for source in journey.forecastable():
        tell(f"forecast of task {source + 2}")
        forecast.append(_forecast(journey, source, gallery))
    tell("images")
    for s in range(journey.learned - 1):
        _forgotten(journey, s, gallery)
    return Analysis(
        seed=journey.seed,
        samples=samples,
        learned=journey.learned,
        overlap=overlap,
        projected=journey.directions is not None,
        variance=variance,
        kernel=kernel,
        forecast=forecast,
        images=gallery.images if gallery.possible else Images(),
    )


@final
@dataclass(frozen=True)
class _Journey:
    """One seed's way through the tasks, as its trace has it.

    Attributes:
        directions: what the method remembers, orthonormal rows (K, p) in the order in which they
            were added, or None; `ranks`, (T,), says how many each task added.
        inputs: of each task some training samples, (n, *), and their labels (n,).
    """

    trace: Trace
    tasks: Scenario
    seed: int
    learned: int
    model: nn.Module
    names: tuple[str, ...]
    directions: Tensor | None
    ranks: list[int]
    inputs: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, trace: Trace, data: Path | None, samples: int) -> "_Journey":
        row = int(np.argmax(trace.finished))
        own = np.isfinite(np.diagonal(trace.accuracy[row]))
        learned = int(np.argmin(own)) if not own.all() else len(own)
        if learned == 0:
            raise TraceError(f"{trace.path or 'the run'} has not learned any task to its end")
        seed, config = trace.seeds[row], settings_of(trace)
        weights = trace.weights(seed, 0)
        tasks = tasks_of(trace, data)
        model = network_of(config, tasks, weights).eval()
        free = out_of_reach(config, tasks, model)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        names = tuple(name for name in trained if name not in free)
        size = sum(p.numel() for name, p in model.named_parameters() if name in names)
        directions, ranks = _remembered(trace, seed, size)
        learned = min(learned, _MOST_TASKS)
        inputs = [_some(tasks.task(t, [seed]).train, samples) for t in range(learned)]
        return cls(trace, tasks, seed, learned, model, names, directions, ranks, inputs)

    def go_to(self, task: int) -> None:
        """Give the network the weights after a task."""
        self.model.load_state_dict(self.trace.weights(self.seed, task))

    def features(self, samples: tuple[Tensor, Tensor]) -> TangentFeatures:
        """φ of the samples where the network is now."""
        return tangent_features(self.model, *samples, params=self.names)

    def before(self, task: int) -> int:
        """How many directions were remembered when a task started."""
        return sum(self.ranks[:task])

    def forecastable(self) -> Iterator[int]:
        """The tasks whose fate under the next one is forecast, spread over the run."""
        if self.trace.method != "sgd" and self.directions is None:
            return
        pairs = self.learned - 1
        yield from sorted(
            {round(i) for i in np.linspace(0, pairs - 1, min(pairs, _MOST_FORECASTS))}
        )

    def basis(self, task: int) -> Tensor | None:
        """What every step avoids while a task is learned, over all trainable parameters."""
        if self.directions is None:
            return None
        rows = self.directions[: self.before(task)]
        sizes = {n: p.numel() for n, p in self.model.named_parameters() if p.requires_grad}
        return widened(rows, self.names, sizes)


def _remembered(trace: Trace, seed: int, size: int) -> tuple[Tensor | None, list[int]]:
    """The directions that a projecting method kept, as rows, if the trace has any."""
    try:
        memory = trace.memory(seed)
    except TraceError:
        return None, []
    rows, ranks = memory.get("directions"), memory.get("ranks")
    if "factor" in memory:  # of samples: the first rows are a basis of the first samples
        kept = FactoredSubspace.restore([memory], torch.zeros(1, size), FACTORED)
        rows = kept.dense().rows[0]
    if rows is None or ranks is None or rows.dim() != 2 or rows.shape[1] != size:
        return None, []
    return rows.float(), [int(rank) for rank in ranks]


def _some(split: Split, count: int) -> tuple[Tensor, Tensor]:
    """Samples spread over the whole set, the same ones every time."""
    index = torch.linspace(0, len(split) - 1, min(count, len(split))).round().long()
    inputs, labels = split.take(index.unsqueeze(0))
    return inputs[0], labels[0]


def _pairs(journey: _Journey) -> tuple[dict[str, list[float]], list[list[float]]]:
    """Overlap spectra of all pairs s < k, and the change of each task's kernel over the run."""
    overlap: dict[str, list[float]] = {}
    kernel: list[list[float]] = []
    grams: list[Tensor] = []
    for t in range(journey.learned):
        journey.go_to(t)
        here = [journey.features(samples) for samples in journey.inputs]
        grams.append(here[t].gram())
        kernel.append([0.0])
        for s in range(t):
            kernel[s].append(round(theory.kernel_change(grams[s], here[s].gram()), _DIGITS))
        inside = _inside(journey, here[t:])
        for k in range(t + 1, journey.learned):
            values = _overlap(here[t], here[k], inside, k - t, journey.before(k))
            overlap[f"{t}-{k}"] = [round(float(v), _DIGITS) for v in values]
    return overlap, kernel


def _inside(journey: _Journey, features: list[TangentFeatures]) -> list[Tensor] | None:
    """φ Bᵀ for the features of several tasks and all directions B, (n, K) each."""
    if journey.directions is None:
        return None
    return [(phi @ journey.directions.T).double() for phi in features]


def _overlap(
    source: TangentFeatures,
    target: TangentFeatures,
    inside: list[Tensor] | None,
    later: int,
    count: int,
) -> Tensor:
    """Singular values of O = W_sᵀ (K_sk − φ_s Bᵀ B φ_kᵀ) W_k with the first `count` directions."""
    cross = source.cross_gram(target).double()
    if inside is not None:
        cross = cross - inside[0][:, :count] @ inside[later][:, :count].T
    grid = [[source.gram(), cross], [cross.T, target.gram()]]
    return theory.overlap_spectrum(theory.gram_overlap(grid, 0, 1, rtol=_RTOL)).clamp(0, 1)


def _variance(journey: _Journey, task: int) -> Variance:
    journey.go_to(task)
    train = journey.tasks.task(task, [journey.seed]).train
    samples = _some(train, _FOR_VARIANCE)
    curve = theory.explained_variance(journey.features(samples).gram())
    kept = journey.ranks[task] if task < len(journey.ranks) else None
    return Variance([round(float(v), _DIGITS) for v in curve], len(samples[1]), kept)


def _forecast(journey: _Journey, source: int, gallery: Gallery) -> ForecastPoint:
    """What the next task was going to do to `source`, and what it did."""
    target = source + 1
    journey.go_to(source)
    known, coming = (journey.tasks.task(t, [journey.seed]) for t in (source, target))
    config = settings_of(journey.trace)
    test = samples_of(known.test)
    outlook = theory.forecast(
        journey.model,
        test,
        samples_of(coming.train),
        lr=config.lr,
        epochs=config.epochs,
        batch_size=config.batch_size,
        source_classes=journey.tasks.classes(source),
        target_classes=journey.tasks.classes(target),
        basis=journey.basis(target),
        overlap_samples=2,  # the overlap is measured elsewhere, with more of them
        quick=True,
        seed=journey.seed,
    )
    places = {int(n): row for row, n in enumerate(outlook.index)}
    worst = outlook.endangered(gallery.most)
    rows = torch.tensor([places[int(n)] for n in worst], dtype=torch.long)
    gallery.add("endangered", source, test, worst, outlook.plain.outputs[rows], outlook.classes)
    accuracy = journey.trace.accuracy[journey.trace.seeds.index(journey.seed)]
    return ForecastPoint(
        source=source,
        target=target,
        predicted=float(outlook.accuracy_change or 0.0),
        measured=float(accuracy[target, source] - accuracy[source, source]),
        trust=float(outlook.trust),
        trusted=outlook.trusted,
    )


def _forgotten(journey: _Journey, task: int, gallery: Gallery) -> None:
    """Test images that were right after their task and are wrong at the end."""
    classes = journey.tasks.classes(task)
    test = samples_of(journey.tasks.task(task, [journey.seed]).test)
    outputs = []
    for when in (task, journey.learned - 1):
        journey.go_to(when)
        with torch.no_grad():
            outputs.append(torch.cat([journey.model(some) for some in test[0].split(1000)]))
    before, after = (margins(o, test[1], classes) for o in outputs)
    lost = torch.nonzero((before > 0) & (after < 0)).flatten()
    worst = lost[after[lost].argsort()][: gallery.most]
    gallery.add("forgotten", task, test, worst, outputs[1][worst], classes)
