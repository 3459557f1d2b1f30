"""Artefacts (tables and figures) and the workshop that trains and measures their runs."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from forgetless.data import Scenario, ScenarioOptions, build_scenario
from forgetless.launch.engines import (
    Engine,
    InProcess,
    Order,
    Watch,
    download,
    download_state,
    publish,
    train,
)
from forgetless.launch.runs import Config, status_of
from forgetless.paper.benchmarks import Run, Scale
from forgetless.paper.numbers import DIVERGED, diverged
from forgetless.paper.pictures import Pictures
from forgetless.paper.replay import Replay
from forgetless.paper.results import Data, Results, rounded
from forgetless.support.provenance import versions
from forgetless.support.validation import ForgetlessError, TraceError, TrainingError, select_options
from forgetless.trace import Keep, Trace, is_complete, is_trace, load_trace
from forgetless.trace.trace import read_beside, write_beside
from forgetless.training.fit import resolve_device

# A cell's path in the data, such as "rotated/ewc" → its run; None if it is known to diverge.
Cells = Mapping[str, Run | None]


@final
@dataclass(frozen=True)
class Probe:
    """A measurement in the weights of a run, computed once and stored next to its trace.

    Arguments:
        name: of the artefact that it is for.
        measure: from the run to JSON values.
        version: of the measurement; results of another version are measured again.
    """

    name: str
    measure: Callable[["Workshop", Run], Any]
    version: int = 1


@final
@dataclass(frozen=True)
class ProbeResult:
    """The values that a probe found, the seconds it took, and the versions it ran on."""

    found: Any
    seconds: float
    versions: dict[str, str]

    @property
    def is_sound(self) -> bool:
        """Whether the fields have the right types, as those of a damaged file may not."""
        timed = isinstance(self.seconds, float | int)
        return timed and isinstance(self.versions, dict) and "device" in self.versions


@final
@dataclass(frozen=True)
class Artefact:
    """A table or figure of the paper, or one that it should have had.

    Arguments:
        name: for `forgetless paper build`; its file in the results has this name.
        title: its heading on the page.
        place: where it is in the paper; empty if nowhere.
        measure: from the cells whose runs are trained to the data that is stored: all that `show`
            and the claims need.
        show: from the data to lines of Markdown; figures go to the pictures.
        cells: its runs, from the scale and the results of the artefacts that it needs.
        needs: artefacts that must be built before.
        probe: its measurement in the weights of each run; None if it needs no weights.
    """

    name: str
    title: str
    place: str
    measure: Callable[["Workshop", Cells], dict[str, Any]]
    show: Callable[[Data, Pictures], list[str]]
    cells: Callable[[Scale, Results], Cells] = lambda scale, results: {}
    needs: tuple[str, ...] = ()
    probe: Probe | None = None

    def runs(self, scale: Scale, results: Results) -> list[Run]:
        """The runs of all cells, without repetition."""
        runs = {run.key: run for run in self.cells(scale, results).values() if run is not None}
        return list(runs.values())

    def has(self, workshop: "Workshop", run: Run) -> bool:
        """Whether everything that it needs of a run is there."""
        if self.probe is None:
            return workshop.is_trained(replace(run, weights=False))
        known = workshop.is_trained(run) and workshop.has_probed(self.probe, run)
        return known or workshop.is_trained(replace(run, weights=True))


def each(
    measure: Callable[["Workshop", Run], Any],
) -> Callable[["Workshop", Cells], dict[str, Any]]:
    """`Artefact.measure` for data with one entry per cell, nested as the cells' paths are."""

    def measure_all(workshop: "Workshop", cells: Cells) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for cell, run in cells.items():
            *path, last = cell.split("/")
            group = data
            for part in path:
                group = group.setdefault(part, {})
            group[last] = {DIVERGED: True} if run is None else measure(workshop, run)
        return data

    return measure_all


def each_probed(probe: Probe) -> Callable[["Workshop", Cells], dict[str, Any]]:
    """`Artefact.measure` for data that has a probe's result for every cell."""
    return each(lambda workshop, run: workshop.probe(probe, run))


@final
class Workshop:
    """Trains and measures: it has the runs, earlier results, data and a device.

    Arguments:
        scale: the size of everything.
        runs: folder of the traces.
        data: folder with datasets, or None.
        device: in the format of the command line.
        results: of artefacts built before.
        shared: address of the runs in shared storage; `runs` is then this machine's copy.
    """

    def __init__(
        self,
        scale: Scale,
        runs: Path,
        data: Path | None,
        device: str,
        results: Results,
        shared: str | None = None,
    ) -> None:
        self.scale = scale
        self.runs = runs
        self.data = data
        self.device = resolve_device(device)
        self.results = results
        self.shared = shared
        self._pulled: set[str] = set()
        self.used: dict[str, Trace] = {}  # by key, since the last `begin`
        self.probed: list[ProbeResult] = []  # used since then
        self._scenarios: dict[ScenarioOptions, tuple[str, Scenario]] = {}

    def begin(self) -> None:
        """Begin to measure an artefact: forget which runs were used."""
        self.used.clear()
        self.probed.clear()

    def is_trained(self, run: Run) -> bool:
        """Whether the run's trace is there, complete and with the weights if the run wants them."""
        folder = self.runs / run.key
        self._pull(run)
        if not is_trace(folder):
            return False
        try:
            trace = load_trace(folder)
        except TraceError:
            return False
        if diverged(trace):
            return True  # and would again
        return is_complete(trace, "weights" if run.weights else "nothing")

    def train(
        self, runs: Sequence[Run], engine: Engine | None = None, watch: Watch | None = None
    ) -> None:
        """Train runs into their folders, resuming unfinished ones.

        A run that diverges leaves a trace that says so. Another failure is raised; with several
        workers, after the other runs.
        """
        if not runs:
            return
        engine = engine or InProcess()
        failures: list[ForgetlessError] = []
        orders = [self.order(run) for run in runs]
        with closing(train(orders, engine, watch or (lambda event: None))) as trained:
            for order, error in trained:
                if isinstance(error, TrainingError) and is_trace(order.folder):
                    trace = load_trace(order.folder)
                    trace.outcome[DIVERGED] = True
                    trace.save_record()
                    if order.shared is not None:
                        publish(order.shared, order.folder, order.config.seed_list())
                elif error is not None and engine.workers == 1:
                    raise error
                elif error is not None:
                    failures.append(error)
        if failures:
            raise failures[0]

    def order(self, run: Run) -> Order:
        """The order for an engine; it resumes an unfinished run with the same settings."""
        config = replace(run.config, device=str(self.device))
        folder = self.runs / run.key
        keep: Keep = "weights" if run.weights else "nothing"
        return Order(
            f"{config.scenario} {config.method}",
            config,
            folder,
            self.data,
            keep,
            resume=self._is_unfinished(folder, config, keep),
            size=run.effort,
            shared=None if self.shared is None else f"{self.shared}/{run.key}",
        )

    @staticmethod
    def _is_unfinished(folder: Path, config: Config, keep: Keep) -> bool:
        try:
            return status_of(folder, config, keep).kind == "unfinished"
        except TraceError:
            return False  # damaged: it is trained again

    def _pull(self, run: Run) -> None:
        """Copy a run from shared storage, once."""
        if self.shared is None or run.key in self._pulled:
            return
        self._pulled.add(run.key)
        address, folder = f"{self.shared}/{run.key}", self.runs / run.key
        download_state(address, folder)
        if is_trace(folder):
            download(address, folder)

    def trace(self, run: Run) -> Trace:
        """The trace of a trained run."""
        trace = load_trace(self.runs / run.key)
        self.used[run.key] = trace
        return trace

    def has_probed(self, probe: Probe, run: Run) -> bool:
        """Whether the result of a probe is stored next to the run."""
        return self._stored(probe, run) is not None

    def probe(self, probe: Probe, run: Run) -> Any:
        """The values that a probe finds in a run's weights: stored ones, or measured and stored.

        Arguments:
            probe: the measurement.
            run: trained, with weights unless the result is stored.
        """
        self.trace(run)
        result = self._stored(probe, run)
        if result is None:
            started = time.perf_counter()
            found = rounded(probe.measure(self, run))
            seconds = time.perf_counter() - started
            result = ProbeResult(found, seconds, versions(self.device))
            write_beside(
                self.runs / run.key, probe.name, self._probe_version(probe), asdict(result)
            )
        self.probed.append(result)
        return result.found

    def _stored(self, probe: Probe, run: Run) -> ProbeResult | None:
        plain = read_beside(self.runs / run.key, probe.name, self._probe_version(probe))
        try:
            result = None if plain is None else ProbeResult(**plain)
        except TypeError:
            return None
        return result if result is not None and result.is_sound else None

    def _probe_version(self, probe: Probe) -> list[Any]:
        return [probe.version, self.scale.name]

    def scenario(self, config: Config) -> Scenario:
        """The tasks of a run."""
        options = select_options(ScenarioOptions, vars(config))
        known = self._scenarios.get(options)
        if known is None or known[0] != config.scenario:
            known = config.scenario, build_scenario(config.scenario, config, self.data)
            self._scenarios = {options: known}  # only the latest: images take memory
        return known[1]

    def untrained(self, config: Config) -> Replay:
        """Networks at their initial weights, and the method of a configuration."""
        return Replay(config, self.scenario(config), None, self.device)

    def replay(self, run: Run, config: Config | None = None) -> Replay:
        """The networks of a run after each task, and a method that remembers tasks there.

        Arguments:
            run: gives the weights.
            config: of the method; the run's own if None.
        """
        config = config or run.config
        if config.storage == "bfloat16":  # in which a basis is orthonormal to three digits only
            config = replace(config, storage="dense")
        return Replay(config, self.scenario(config), self.trace(run), self.device)
