"""Table 1 again with the methods as they should be: where the released code decides the result."""

from typing import Any

from forgetless.paper.artefact import Artefact, Data
from forgetless.paper.artefacts import strength, table1
from forgetless.paper.numbers import DIVERGED, accuracies, ahead, cell, picked, table
from forgetless.paper.pictures import LABELS, NAMES, Pictures
from forgetless.paper.run import Run
from forgetless.paper.scale import METHODS, Protocol, Scale
from forgetless.paper.store import Results
from forgetless.paper.work import Workshop


def cell_run(
    scale: Scale, results: Results, benchmark: str, method: str, protocol: Protocol
) -> Run | None:
    """The run of one cell; None if EWC diverged with every strength."""
    if protocol == "released":
        return table1.cell_run(scale, benchmark, method)
    if method != "ewc":
        return mended_run(scale, benchmark, method, protocol)
    found = strength.chosen(results, benchmark, protocol)
    if found is None:
        return None
    return mended_run(scale, benchmark, method, protocol, ewc_strength=found)


def mended_run(
    scale: Scale, benchmark: str, method: str, protocol: Protocol, **settings: Any
) -> Run:
    """A run under another protocol than the released one; PCA-OGD keeps its rows in bfloat16."""
    if method == "pca-ogd":
        settings["storage"] = "bfloat16"
    return Run(scale.config(benchmark, method, protocol, **settings))


def variants(scale: Scale, benchmark: str) -> tuple[Protocol, ...]:
    """The protocols that differ on a benchmark."""
    both: tuple[Protocol, ...] = ("released", "corrected")
    return ("released", "frozen", "corrected") if scale.benchmarks[benchmark].network else both


def _cells(scale: Scale) -> dict[str, tuple[str, Protocol, str]]:
    """Benchmark, protocol and method of every cell, by the name of its part."""
    return {
        f"{b}/{p}/{m}": (b, p, m)
        for b in scale.benchmarks
        for p in variants(scale, b)
        for m in METHODS
    }


def parts(scale: Scale, results: Results) -> dict[str, list[Run]]:
    """Every cell under every protocol; where protocols do not differ, it is the same run.

    Which strength EWC has is not known before its search: then those runs are needed as well.
    """
    found = {}
    for part, (benchmark, protocol, method) in _cells(scale).items():
        run = cell_run(scale, results, benchmark, method, protocol)
        found[part] = [] if run is None else [run]
        if method == "ewc":
            found[part] += strength.unsearched(scale, results, benchmark, protocol)
    return found


def measure(workshop: Workshop) -> dict[str, Any]:
    """A_T and F_T of every cell, seed by seed: benchmark → protocol → method."""
    data: dict[str, Any] = {}
    cells = _cells(workshop.scale)
    for part in workshop.measurable(cells):
        benchmark, protocol, method = cells[part]
        run = cell_run(workshop.scale, workshop.results, benchmark, method, protocol)
        of = {DIVERGED: True} if run is None else accuracies(workshop.trace(run))
        kept = picked(of, "average", "forgetting")
        data.setdefault(benchmark, {}).setdefault(protocol, {})[method] = kept
    return data


def show(data: Data, pictures: Pictures) -> list[str]:
    """One row a benchmark and protocol."""
    rows = []
    for benchmark, protocols in data.items():
        for protocol, methods in protocols.items():
            cells = [cell(methods.get(method)) for method in METHODS]
            rows.append([f"{NAMES[benchmark]}, {protocol}", *cells])
    return [
        *table(["A_T / F_T", *(LABELS[m] for m in METHODS)], rows),
        "*released*: the paper's code as it ran, but for the departures named above. *corrected*: "
        "A-GEM's remembered samples each go through their own head and heads train; EWC's Fisher "
        "is a mean and its strength was searched on held-out images; PCA is uncentred; on Split "
        "CIFAR the whole network trains, convolutions too, and batch norm goes on learning its "
        "statistics, which no method protects. *frozen*: the corrected methods, but on Split CIFAR "
        "the convolutions stay as initialised and batch norm freezes after 1,000 steps, as "
        "released. PCA-OGD's rows are kept in float32 under the released protocol and in bfloat16 "
        f"under the others.{_on_ewc(data)}",
        "",
    ]


def _on_ewc(data: Data) -> str:
    """Where the strength that was searched turned out worse than the released one, in words."""
    worse = []
    for benchmark, of in data.items():
        released, frozen = (of.get(p, {}).get("ewc", {}) for p in ("released", "frozen"))
        if "average" in released and "average" in frozen:
            lead, noise = ahead(released["average"], frozen["average"])
            worse += [NAMES[benchmark]] if lead > noise else []
    text = (
        f" On {', '.join(worse)} the strength that few seeds chose for EWC, *frozen*, is worse on "
    )
    return text + "the test images than the released one." if worse else ""


ARTEFACT = Artefact(
    "protocols",
    "Released and corrected",
    "section 5.3, Table 1",
    measure,
    show,
    parts,
    needs=("ewc-strength",),
)
