"""Why a run forgot: overlap, explained variance, kernel change and forecast, from its trace."""

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, final

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import forgetless.theory as theory
from forgetless.data import Scenario, Split
from forgetless.launch.rebuild import Rebuilt, projections, rebuild, samples_of
from forgetless.linalg import Layout
from forgetless.methods import METHODS, Method, build_method, method_options
from forgetless.subspace import FACTORED, FactoredSubspace
from forgetless.support.progress import advance, bar_on_terminal
from forgetless.support.validation import TraceError, whole
from forgetless.tangent import TangentFeatures, tangent_features
from forgetless.theory.forecasting import margins, newly_wrong
from forgetless.trace import Trace, tasks_learned
from forgetless.trace.trace import read_beside, write_beside
from forgetless.training.models import ModelSource
from forgetless.training.settings import Training

_MOST_BYTES = 400_000  # of all pictures of a run: a page of five runs stays small
SAMPLES = 200
_FORMAT = 4  # of a stored analysis
_NAME = "analysis"
_FOR_VARIANCE = 500  # samples whose directions are counted
_MOST_TASKS = 20  # whose pairs are measured
_MOST_FORECASTS = 4
_DIGITS = 5


@final
@dataclass(frozen=True)
class Variance:
    """The variance of a task's tangent features, at the weights after learning it.

    Attributes:
        curve: the share that the first 1, 2, … directions explain.
        samples: the number of samples.
        kept: how many directions of the task the method stored; None if it stores none.
    """

    curve: list[float]
    samples: int
    kept: int | None


@final
@dataclass(frozen=True)
class ForecastPoint:
    """Change of the accuracy on a task while the next one is learned, in points.

    Attributes:
        source, target: the tasks, from 0.
        predicted, measured: before and after.
        trust: reliability of the forecast, 0 to 1; `trusted`: whether it is high enough.
    """

    source: int
    target: int
    predicted: float
    measured: float
    trust: float
    trusted: bool


@final
@dataclass(frozen=True)
class Sample:
    """A test image: its number in the task's test set, its class, and the network's guess."""

    id: str
    label: int
    guess: int


@final
@dataclass(frozen=True)
class Images:
    """Test images of each task that are predicted to become wrong, and that were forgotten.

    Attributes:
        pictures: the images as data URLs, by their number.
        endangered: task (from 0, as text) → those predicted to become wrong, worst first.
        forgotten: task → those right when it was learned and wrong at the end, worst first.
    """

    pictures: dict[str, str] = field(default_factory=dict)
    endangered: dict[str, list[Sample]] = field(default_factory=dict)
    forgotten: dict[str, list[Sample]] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Analysis:
    """Why one seed of a run forgot.

    Attributes:
        seed: which one.
        samples: of each task, for overlaps and kernels.
        learned: T', the number of tasks analysed.
        overlap: "s-k" (tasks from 0, s < k) → singular values of O^{s→k}, decreasing, at the
            weights after s, with the directions stored when k starts projected out.
        projected: whether the method's directions were taken out; else the overlap is as for SGD.
        unprotected: "s-k" → the share of the variance of s's features that steps of task k may
            still change, at the weights after s: 1 without a method's projection.
        variance: of each task.
        kernel: for each task s, ‖K_t − K_s‖ / ‖K_s‖ on it after tasks t = s … T' − 1.
        forecast: for pairs of neighbouring tasks, if the method can be forecast.
        images: the samples themselves.
    """

    seed: int
    samples: int
    learned: int
    overlap: dict[str, list[float]]
    projected: bool
    unprotected: dict[str, float]
    variance: list[Variance]
    kernel: list[list[float]]
    forecast: list[ForecastPoint]
    images: Images

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def restore(cls, plain: Mapping[str, Any]) -> Self:
        """From the result of `plain`."""
        values = dict(plain)
        images = values["images"]
        lists = {
            kind: {task: [Sample(**one) for one in found] for task, found in images[kind].items()}
            for kind in ("endangered", "forgotten")
        }
        values["images"] = Images(dict(images["pictures"]), **lists)
        values["variance"] = [Variance(**one) for one in values["variance"]]
        values["forecast"] = [ForecastPoint(**one) for one in values["forecast"]]
        return cls(**values)


@final
class Gallery:
    """Collects pictures of test images, each once, up to a total size.

    Arguments:
        shape: of an input; only (1 or 3, height, width) is an image.
    """

    most = 8  # of each kind and task

    def __init__(self, shape: Sequence[int]) -> None:
        self.possible = len(shape) == 3 and shape[0] in (1, 3)
        self.images = Images()
        self._bytes = 0

    def add(
        self,
        kind: Literal["endangered", "forgotten"],
        task: int,
        test: tuple[Tensor, Tensor],
        index: Tensor,
        outputs: Tensor,
        classes: range,
    ) -> None:
        """Add the samples at `index` of a task's test set, with the class the network gives them.

        Arguments:
            test: inputs (n, c, h, w) and labels (n,).
            outputs: of the samples at `index`, (m, C); the largest within `classes` is the guess.
        """
        if not self.possible:
            return
        inputs, labels = test
        found = []
        for number, output in zip(index.tolist(), outputs, strict=True):
            name = f"{task + 1}.{number + 1}"
            if name not in self.images.pictures:
                picture = _data_url(inputs[number], float(inputs.min()), float(inputs.max()))
                if self._bytes + len(picture) > _MOST_BYTES:
                    break
                self._bytes += len(picture)
                self.images.pictures[name] = picture
            guess = classes.start + int(output[classes.start : classes.stop].argmax())
            found.append(Sample(name, int(labels[number]), guess))
        getattr(self.images, kind)[str(task)] = found


def _data_url(image: Tensor, low: float, high: float) -> str:
    """A PNG file of an image (c, h, w) with values from low to high."""
    scaled = ((image - low) / max(high - low, 1e-12) * 255).round().clamp(0, 255).to(torch.uint8)
    pixels = scaled.permute(1, 2, 0).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(
        file, "PNG", optimize=True
    )
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def known_analysis(trace: Trace) -> Analysis | None:
    """The analysis stored next to a trace, if it is of this very run."""
    plain = None if trace.path is None else read_beside(trace.path, _NAME, _FORMAT)
    try:
        return None if plain is None else Analysis.restore(plain)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # damaged: it can be made again


def cached_analysis(
    trace: Trace,
    *,
    tasks: Scenario | None = None,
    model: ModelSource | None = None,
    data: Path | None = None,
    samples: int = SAMPLES,
    on_stage: Callable[[str], None] | None = None,
) -> Analysis:
    """`analyse`, or the analysis stored next to the trace; a new one is stored there."""
    known = known_analysis(trace)
    if known is not None and known.samples == samples:
        return known
    made = analyse(trace, tasks=tasks, model=model, data=data, samples=samples, on_stage=on_stage)
    if trace.path is not None:
        write_beside(trace.path, _NAME, _FORMAT, made.plain())
    return made


@bar_on_terminal("analysis")
def analyse(
    trace: Trace,
    *,
    tasks: Scenario | None = None,
    model: ModelSource | None = None,
    data: Path | None = None,
    samples: int = SAMPLES,
    on_stage: Callable[[str], None] | None = None,
) -> Analysis:
    """Why the first finished seed of a run forgot.

    Needs the weights after each task in the trace and the data on disk; nothing is downloaded.

    Arguments:
        trace: of the run.
        tasks, model: as `fit` took them, if they were a script's own.
        data: folder that is searched for the data first.
        samples: of each task, for overlaps and kernels.
        on_stage: called with each step in words.
    """
    whole(2).check("samples", samples)

    def tell(what: str) -> None:
        advance(what, 0, 1)
        if on_stage is not None:
            on_stage(what)

    tell("reading the tasks")
    rebuilt = rebuild(trace, tasks=tasks, model=model, data=data)
    run = _SeedRun.of(trace, rebuilt, samples)
    tell("overlap and kernels")
    overlap, unprotected, kernel = _pairs(run)
    tell("explained variance")
    variance = [_variance(run, s) for s in range(run.learned)]
    gallery = Gallery(run.tasks.input_shape)
    forecast = []
    for source in run.forecastable():
        tell(f"forecast of task {source + 2}")
        forecast.append(_forecast(run, source, gallery))
    tell("images")
    for s in range(run.learned - 1):
        _forgotten(run, s, gallery)
    return Analysis(
        seed=run.seed,
        samples=samples,
        learned=run.learned,
        overlap=overlap,
        projected=run.protected is not None,
        unprotected=unprotected,
        variance=variance,
        kernel=kernel,
        forecast=forecast,
        images=gallery.images if gallery.possible else Images(),
    )


@final
@dataclass(frozen=True)
class _SeedRun:
    """One seed of a run: its network at the weights after any task.

    Attributes:
        protected: what the method protects when each task starts: orthonormal rows (K, p), or the
            projection of rows (n, p); None if it protects no directions.
        ranks: how many directions each task added, (T,); empty if they are not those of a task.
        inputs: some training samples of each task, (n, *), and their labels (n,).
    """

    trace: Trace
    tasks: Scenario
    training: Training
    seed: int
    learned: int
    model: nn.Module
    names: tuple[str, ...]
    protected: Sequence[theory.Protected] | None
    ranks: list[int]
    inputs: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, trace: Trace, rebuilt: Rebuilt, samples: int) -> "_SeedRun":
        row = int(np.argmax(trace.finished))
        learned = tasks_learned(trace.accuracy[row])
        if learned == 0:
            raise TraceError(f"{trace.path or 'the run'} has not learned any task to its end")
        seed, tasks = trace.seeds[row], rebuilt.tasks
        model = rebuilt.network(trace.weights(seed, 0)).eval()
        free = rebuilt.out_of_reach(model)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        names = tuple(name for name in trained if name not in free)
        size = sum(p.numel() for name, p in model.named_parameters() if name in names)
        learned = min(learned, _MOST_TASKS)
        rows, ranks = _remembered(trace, seed, size)
        protected: Sequence[theory.Protected] | None = None
        if rows is not None:
            protected = [rows[: sum(ranks[:t])] for t in range(learned)]
        elif (method := _with_directions(trace)) is not None:
            protected = projections(rebuilt, method, trace, seed, learned, names)
        inputs = [_some(tasks.task(t, [seed]).train, samples) for t in range(learned)]
        return cls(
            trace, tasks, rebuilt.training, seed, learned, model, names, protected, ranks, inputs
        )

    def go_to(self, task: int) -> None:
        """Load the weights after a task."""
        self.model.load_state_dict(self.trace.weights(self.seed, task))

    def features(self, samples: tuple[Tensor, Tensor]) -> TangentFeatures:
        """φ of the samples at the present weights."""
        return tangent_features(self.model, *samples, params=self.names)

    def forecastable(self) -> Iterator[int]:
        """The tasks for which the effect of the next one is forecast, spread over the run."""
        kind = METHODS.get(self.trace.method)
        if (kind is None or kind.protects) and self.protected is None:
            return  # how the method changes the gradient is not in the trace
        if not self.training.is_constant_sgd:
            return  # a forecast is of plain SGD at a constant rate
        pairs = self.learned - 1
        yield from sorted(
            {round(i) for i in np.linspace(0, pairs - 1, min(pairs, _MOST_FORECASTS))}
        )

    def basis(self, task: int) -> theory.Protected | None:
        """What every step of a task avoids, over all trainable parameters."""
        if self.protected is None:
            return None
        here = self.protected[task]
        shapes = {n: tuple(p.shape) for n, p in self.model.named_parameters() if p.requires_grad}
        trained, own = Layout(shapes), Layout({name: shapes[name] for name in self.names})
        if isinstance(here, Tensor):
            return trained.join(own.split(here))

        def taken(rows: Tensor) -> Tensor:
            parts = trained.split(rows)
            return trained.join(parts | own.split(here(own.join(parts))))

        return taken


def _remembered(trace: Trace, seed: int, size: int) -> tuple[Tensor | None, list[int]]:
    """The directions that a projecting method stored, as rows, if the trace has any."""
    if "storage" not in trace.config:  # which methods that store directions use
        return None, []
    try:
        state = trace.state(seed)
    except TraceError:
        return None, []
    rows, ranks = state.get("directions"), state.get("ranks")
    if "factor" in state:  # of samples: the first rows are a basis of the first samples
        kept = FactoredSubspace.restore([state], torch.zeros(1, size), FACTORED)
        rows = kept.dense().rows[0]
    if rows is None or ranks is None or rows.dim() != 2 or rows.shape[1] != size:
        return None, []
    return rows.float(), [int(rank) for rank in ranks]


def _with_directions(trace: Trace) -> Method[Any] | None:
    """The run's method, if it keeps directions; a method of a script's own is not known."""
    kind = METHODS.get(trace.method)
    if kind is None or not kind.keeps_directions:
        return None
    known = method_options(trace.method)
    return build_method(trace.method, {k: v for k, v in trace.config.items() if k in known})


def _some(split: Split, count: int) -> tuple[Tensor, Tensor]:
    """Samples spread evenly over the set, always the same."""
    index = torch.linspace(0, len(split) - 1, min(count, len(split))).round().long()
    inputs, labels = split.take(index.unsqueeze(0))
    return inputs[0], labels[0]


def _pairs(
    run: _SeedRun,
) -> tuple[dict[str, list[float]], dict[str, float], list[list[float]]]:
    """Of all pairs s < k the overlap's spectrum and what of s is unprotected; kernels' changes."""
    overlap: dict[str, list[float]] = {}
    unprotected: dict[str, float] = {}
    kernel: list[list[float]] = []
    grams: list[Tensor] = []
    for t in range(run.learned):
        run.go_to(t)
        here = [run.features(samples) for samples in run.inputs]
        grams.append(here[t].gram())
        kernel.append([0.0])
        for s in range(t):
            kernel[s].append(round(theory.kernel_change(grams[s], here[s].gram()), _DIGITS))
        for k in range(t + 1, run.learned):
            basis = None if run.protected is None else run.protected[k]
            matrix = theory.operator_overlap(here[t], here[k], basis, rtol=theory.FLOAT32_RTOL)
            values = theory.overlap_spectrum(matrix).clamp(0, 1)
            overlap[f"{t}-{k}"] = [round(float(v), _DIGITS) for v in values]
            unprotected[f"{t}-{k}"] = round(theory.unprotected_share(here[t], basis), _DIGITS)
    return overlap, unprotected, kernel


def _variance(run: _SeedRun, task: int) -> Variance:
    run.go_to(task)
    train = run.tasks.task(task, [run.seed]).train
    samples = _some(train, _FOR_VARIANCE)
    curve = theory.explained_variance(run.features(samples).gram())
    kept = run.ranks[task] if task < len(run.ranks) else None
    return Variance([round(float(v), _DIGITS) for v in curve], len(samples[1]), kept)


def _forecast(run: _SeedRun, source: int, gallery: Gallery) -> ForecastPoint:
    """The forecast of the next task's effect on `source`, and the measured effect."""
    target = source + 1
    run.go_to(source)
    known, coming = (run.tasks.task(t, [run.seed]) for t in (source, target))
    training = run.training
    test = samples_of(known.test)
    outlook = theory.linearised_forecast(
        run.model,
        test,
        samples_of(coming.train),
        lr=training.lr,
        epochs=training.epochs,
        batch_size=training.batch_size,
        source_classes=run.tasks.competing(source, target),
        target_classes=run.tasks.competing(target),
        basis=run.basis(target),
        overlap_samples=2,  # the overlap is measured elsewhere, with more of them
        quick=True,
        seed=run.seed,
    )
    places = {int(n): row for row, n in enumerate(outlook.index)}
    worst = outlook.endangered(gallery.most)
    rows = torch.tensor([places[int(n)] for n in worst], dtype=torch.long)
    gallery.add("endangered", source, test, worst, outlook.after.outputs[rows], outlook.classes)
    accuracy = run.trace.accuracy[run.trace.seeds.index(run.seed)]
    return ForecastPoint(
        source=source,
        target=target,
        predicted=float(outlook.accuracy_change or 0.0),
        measured=float(accuracy[target, source] - accuracy[source, source]),
        trust=float(outlook.trust),
        trusted=outlook.trusted,
    )


def _forgotten(run: _SeedRun, task: int, gallery: Gallery) -> None:
    """Test images that were classified right after their task and wrong at the end."""
    times = task, run.learned - 1
    test = samples_of(run.tasks.task(task, [run.seed]).test)
    outputs = []
    for when in times:
        run.go_to(when)
        with torch.no_grad():
            outputs.append(torch.cat([run.model(some) for some in test[0].split(1000)]))
    classes = [run.tasks.competing(task, when) for when in times]
    before, after = (margins(o, test[1], c) for o, c in zip(outputs, classes, strict=True))
    worst = newly_wrong(before, after, gallery.most)
    gallery.add("forgotten", task, test, worst, outputs[1][worst], classes[1])
