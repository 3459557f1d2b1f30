"""EWC's strength, searched on images held out of the training set, for the corrected protocol."""

from typing import Any

from forgetless.paper.artefact import Artefact, Data
from forgetless.paper.numbers import accuracies, mean, table
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


def parts(scale: Scale, results: Results) -> dict[str, list[Run]]:
    """Every strength for every variant."""
    return {f"{b} {p}": [_run(scale, b, p, s) for s in scale.strengths] for b, p in variants(scale)}


def measure(workshop: Workshop) -> dict[str, Any]:
    """A_T on the held-out images of every strength, None where training diverged."""
    data: dict[str, Any] = {}
    strengths, searched = workshop.scale.strengths, parts(workshop.scale, workshop.results)
    for part in workshop.measurable(searched):
        tried = {}
        for strength, run in zip(strengths, searched[part], strict=True):
            of = accuracies(workshop.trace(run))
            tried[f"{strength:g}"] = None if "diverged" in of else list(of["average"])
        best = max((s for s in tried if tried[s]), key=lambda s: mean(tried[s]), default=None)
        data[part] = {"tried": tried, "chosen": best and float(best)}
    return data


def chosen(results: Results, benchmark: str, protocol: Protocol) -> float | None:
    """The strength that the search chose, None if it has not been built or all diverged."""
    value = _searches(results).get(f"{benchmark} {protocol}", {}).get("chosen")
    return None if value is None else float(value)


def unsearched(scale: Scale, results: Results, benchmark: str, protocol: Protocol) -> list[Run]:
    """The runs that a search still needs; none if it was built."""
    part = f"{benchmark} {protocol}"
    return [] if part in _searches(results) else parts(scale, results).get(part, [])


def _searches(results: Results) -> Data:
    data: Data = results.get("ewc-strength", {"data": {}})["data"]
    return data


def show(data: Data, pictures: Pictures) -> list[str]:
    """A_T on held-out images for every strength."""
    strengths = list(next(iter(data.values()))["tried"])
    seeds = max((len(a) for of in data.values() for a in of["tried"].values() if a), default=0)
    limits = {float(strengths[0]), float(strengths[-1])}
    ends = ", ".join(titled(variant) for variant, of in data.items() if of["chosen"] in limits)
    rows = [
        [
            titled(variant),
            *(f"{mean(a):.1f}" if a else "diverged" for a in of["tried"].values()),
            f"{of['chosen']:g}" if of["chosen"] else "none",
        ]
        for variant, of in data.items()
    ]
    return [
        *table(["A_T on held-out images", *strengths, "chosen"], rows),
        f"{seeds} seeds. The Fisher information is the mean over a task's samples here. The "
        "released code divides its sum by 1,024, so its strength 10 is 98 on a task of 10,000 "
        "samples."
        + (f" At the end of the grid, so that others may be better: {ends}." if ends else ""),
        "",
    ]


ARTEFACT = Artefact(
    "ewc-strength",
    "EWC's strength, searched",
    "appendix, hyperparameters",
    measure,
    show,
    parts,
)
