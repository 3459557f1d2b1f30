"""EWC's strength, searched on images held out of the training set, for the corrected protocol."""

from typing import Any

from forgetless.paper.artefact import Artefact, Data
from forgetless.paper.numbers import DIVERGED, UNMEASURED, accuracies, mean, table
from forgetless.paper.pictures import Pictures, titled
from forgetless.paper.run import Run
from forgetless.paper.scale import Protocol, Scale
from forgetless.paper.store import Results
from forgetless.paper.work import Workshop


def variants(scale: Scale) -> list[tuple[str, Protocol]]:
    """Benchmark and protocol of every search: both networks where the protocols' differ."""
    pairs: list[tuple[str, Protocol]] = [(b, "corrected") for b in scale.benchmarks]
    return pairs + [(b, "frozen") for b, of in scale.benchmarks.items() if of.network]


def _run(scale: Scale, benchmark: str, protocol: Protocol, strength: float) -> Run:
    config = scale.config(
        benchmark,
        "ewc",
        protocol,
        ewc_strength=strength,
        seeds=scale.search_seeds,
        validation_per_class=scale.validation,
    )
    return Run(config)


def _search(benchmark: str, protocol: Protocol) -> str:
    return f"{benchmark} {protocol}"


def _tries(scale: Scale) -> dict[str, tuple[str, str, Run]]:
    """Search, strength and run of every try, by the name of its part."""
    return {
        f"{_search(b, p)}/{s:g}": (_search(b, p), f"{s:g}", _run(scale, b, p, s))
        for b, p in variants(scale)
        for s in scale.strengths
    }


def parts(scale: Scale, results: Results) -> dict[str, list[Run]]:
    """Every strength for every variant."""
    return {part: [run] for part, (_, _, run) in _tries(scale).items()}


def measure(workshop: Workshop) -> dict[str, Any]:
    """A_T on the held-out images: search → strength, None where training diverged."""
    data: dict[str, Any] = {}
    tries = _tries(workshop.scale)
    for part in workshop.measurable(tries):
        search, strength, run = tries[part]
        of = accuracies(workshop.trace(run))
        found = None if DIVERGED in of else list(of["average"])
        data.setdefault(search, {})[strength] = found
    return data


def best(tried: Data) -> float | None:
    """The strength with the highest A_T of one search, None if all diverged."""
    strengths = [strength for strength, found in tried.items() if found]
    return float(max(strengths, key=lambda s: mean(tried[s]))) if strengths else None


def chosen(results: Results, benchmark: str, protocol: Protocol) -> float | None:
    """The strength that a search chose, None if it has not been built or all diverged."""
    return best(_searches(results).get(_search(benchmark, protocol), {}))


def unsearched(scale: Scale, results: Results, benchmark: str, protocol: Protocol) -> list[Run]:
    """The runs that a protocol's search still needs; none if there is one or it takes none."""
    is_searched = (benchmark, protocol) in variants(scale)
    if not is_searched or _search(benchmark, protocol) in _searches(results):
        return []
    return [_run(scale, benchmark, protocol, strength) for strength in scale.strengths]


def _searches(results: Results) -> Data:
    data: Data = results.get("ewc-strength", {"data": {}})["data"]
    return data


def show(data: Data, pictures: Pictures) -> list[str]:
    """A_T on held-out images for every strength."""
    strengths = sorted({strength for tried in data.values() for strength in tried}, key=float)
    seeds = max((len(a) for tried in data.values() for a in tried.values() if a), default=0)
    limits = {float(strengths[0]), float(strengths[-1])}
    ends = ", ".join(titled(search) for search, tried in data.items() if best(tried) in limits)
    rows = [
        [titled(search), *(_cell(tried, s) for s in strengths), _choice(tried)]
        for search, tried in data.items()
    ]
    return [
        *table(["A_T on held-out images", *strengths, "chosen"], rows),
        f"{seeds} seeds. The Fisher information is the mean over a task's samples here. The "
        "released code divides its sum by 1,024, so its strength 10 is 98 on a task of 10,000 "
        "samples."
        + (f" At the end of the grid, so that others may be better: {ends}." if ends else ""),
        "",
    ]


def _choice(tried: Data) -> str:
    strength = best(tried)
    return "none" if strength is None else f"{strength:g}"


def _cell(tried: Data, strength: str) -> str:
    if strength not in tried:
        return UNMEASURED
    return f"{mean(tried[strength]):.1f}" if tried[strength] else DIVERGED


ARTEFACT = Artefact(
    "ewc-strength",
    "EWC's strength, searched",
    "appendix, hyperparameters",
    measure,
    show,
    parts,
)
