"""Whether forgetting grows as tasks align: overlap, Δ and lost accuracy over pairs of tasks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from forgetless.paper.numbers import table
from forgetless.paper.pictures import Pictures
from forgetless.paper.results import Data
from forgetless.paper.workshop import Artefact, Cells, Workshop

# Measured by scripts/forecast_mnist.py, one network for each source task.
PAIRS = Path("results/forecast/pairs.json")
_NAMES = {"rotated-mnist": "Rotated", "permuted-mnist": "Permuted", "split-mnist": "Split MNIST"}
OVERLAPS = {"mean_overlap": "mean", "overlap": "largest"}
EFFECTS = {"delta": "Δ", "lost": "lost accuracy"}
_DRAWS = 2000


def measure(workshop: Workshop, cells: Cells) -> dict[str, Any]:
    """Rank correlations with their intervals, by benchmark; nothing where there are no pairs."""
    if workshop.scale.name != "full" or not PAIRS.is_file():
        return {}
    pairs = json.loads(PAIRS.read_text("utf-8"))["pairs"]
    return {
        name: correlations([pair for pair in pairs if pair["benchmark"] == benchmark])
        for benchmark, name in _NAMES.items()
    }


def correlations(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """The number of pairs and tasks, and each correlation with its 95 % interval."""
    ends = np.array([(pair["source"], pair["target"]) for pair in pairs])
    columns = {name: np.array([pair[name] for pair in pairs]) for name in OVERLAPS}
    delta = np.array([pair["delta_measured"] for pair in pairs])
    effects = {"delta": delta, "lost": -np.array([pair["measured"] for pair in pairs])}
    return {
        "pairs": len(pairs),
        "tasks": len(np.unique(ends)),
        **{
            f"{overlap} {effect}": with_interval(columns[overlap], effects[effect], ends)
            for overlap in OVERLAPS
            for effect in EFFECTS
        },
    }


def with_interval(
    x: NDArray[np.float64], y: NDArray[np.float64], ends: NDArray[np.int64]
) -> list[float]:
    """Spearman's correlation over pairs of tasks, and a bootstrap interval over the tasks.

    Pairs share networks and tasks: tasks are drawn with replacement, and a pair counts as often as
    the product of how often its source and its target were drawn.

    Arguments:
        x, y: (pairs,).
        ends: source and target of each pair, (pairs, 2).
    """
    rng = np.random.default_rng(0)
    tasks = np.unique(ends)
    where = np.searchsorted(tasks, ends)
    found = []
    for _ in range(_DRAWS):
        counts = np.bincount(rng.integers(len(tasks), size=len(tasks)), minlength=len(tasks))
        drawn = np.repeat(np.arange(len(x)), counts[where].prod(1))
        if len(np.unique(x[drawn])) > 2:
            found.append(_spearman(x[drawn], y[drawn]))
    return [_spearman(x, y), *map(float, np.quantile(found, [0.025, 0.975]))]


def _spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    return float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])


def shown(interval: list[float]) -> str:
    """A correlation with its interval."""
    value, low, high = interval
    return f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"


def show(data: Data, pictures: Pictures) -> list[str]:
    """The correlations by benchmark."""
    if not data:
        return ["No pairs were measured at this scale.", ""]
    rows = [
        [
            f"{name}, {OVERLAPS[overlap]} singular value",
            f"{found['pairs']}",
            *(shown(found[f"{overlap} {effect}"]) for effect in EFFECTS),
        ]
        for name, found in data.items()
        for overlap in OVERLAPS
    ]
    return [
        *table(
            ["rank correlation of O's", "pairs", *(f"with {e}" for e in EFFECTS.values())], rows
        ),
        "A network learns the source task by SGD, then the target, for every ordered pair "
        "([results/forecast](../results/forecast), one seed): the overlap of both tasks before the "
        "target is learned, Δ of the true-class outputs on the source's test set, and the accuracy "
        "lost there. In brackets 95 % bootstrap intervals over tasks, as pairs share networks; "
        "Split MNIST has five tasks, Permuted eight here.",
        "",
    ]


ALIGNMENT = Artefact(
    "alignment",
    "Whether forgetting grows as tasks align",
    "abstract, section 4.2",
    measure,
    show,
)
