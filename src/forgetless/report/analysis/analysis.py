"""The results of an analysis as plain numbers, ready to be stored."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self, final


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
