"""Where artefacts get what they need: runs trained once and kept, and what was found in them."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, final

from forgetless.data import Scenario, ScenarioOptions, build_scenario
from forgetless.launch.config import Config
from forgetless.launch.engines import Engine, InProcess, Order, Watch, collect, pull, settle, train
from forgetless.launch.runs import Standing, standing
from forgetless.paper.numbers import DIVERGED, diverged
from forgetless.paper.replay import Replay
from forgetless.paper.run import Run
from forgetless.paper.scale import Scale
from forgetless.paper.store import Results, rounded
from forgetless.support.errors import ForgetlessError, TraceError, TrainingError
from forgetless.support.provenance import versions
from forgetless.trace import Trace, is_trace, load_trace
from forgetless.trace.cache import read_beside, write_beside
from forgetless.training.fit import Keep, resolve_device


@final
@dataclass(frozen=True)
class Look:
    """What an artefact finds in a run's weights.

    Arguments:
        name: of the artefact.
        find: from the run to what JSON can hold.
        version: of what is found; what another one has found is found anew.
    """

    name: str
    find: Callable[["Workshop", Run], Any]
    version: int = 1


@final
@dataclass(frozen=True)
class Glance:
    """What was found in a run's weights, the seconds it took, and on what it was found."""

    found: Any
    seconds: float
    versions: dict[str, str]

    @property
    def is_sound(self) -> bool:
        """Whether it is what was written, as far as one can tell."""
        timed = isinstance(self.seconds, float | int)
        return timed and isinstance(self.versions, dict) and "device" in self.versions


@final
class Workshop:
    """Where artefacts are measured: trained runs, earlier results, data and a device.

    Arguments:
        scale: how large everything is.
        runs: folder of the traces.
        data: folder with datasets, or None.
        device: as the command line takes it.
        results: what has been built before.
        storage: address of the runs in shared storage; `runs` is then what this machine has.
    """

    def __init__(
        self,
        scale: Scale,
        runs: Path,
        data: Path | None,
        device: str,
        results: Results,
        storage: str | None = None,
    ) -> None:
        self.scale = scale
        self.runs = runs
        self.data = data
        self.device = resolve_device(device)
        self.results = results
        self.storage = storage
        self._brought: set[str] = set()
        self.used: dict[str, Trace] = {}  # by key, since the last `begin`
        self.glances: list[Glance] = []  # that were used, since then
        self.lacking: Sequence[str] = ()  # parts of what is being measured
        self._scenarios: dict[ScenarioOptions, tuple[str, Scenario]] = {}

    def is_trained(self, run: Run) -> bool:
        """Whether the run's trace is there, complete and with all that is needed of it."""
        folder = self.runs / run.key
        self._bring(run)
        if not is_trace(folder):
            return False
        try:
            trace = load_trace(folder)
        except TraceError:
            return False
        if diverged(trace):
            return True  # and would again
        files = [f"task-{t:02d}.safetensors" for t in range(1, len(trace.tasks) + 1)]
        kept = [folder / f"seed-{seed}" / file for seed in trace.seeds for file in files]
        return trace.status == "complete" and (
            not run.weights or all(file.is_file() for file in kept)
        )

    def train(
        self, runs: Sequence[Run], engine: Engine | None = None, watch: Watch | None = None
    ) -> None:
        """Train runs into their folders, going on with those that were begun.

        One that diverges leaves a trace that says so. What breaks one in another way is raised,
        where several go on at a time after the others.
        """
        if not runs:
            return
        engine = engine or InProcess()
        failures: list[ForgetlessError] = []
        orders = {run.key: self.order(run) for run in runs}
        with closing(
            train(list(orders.values()), engine, watch or (lambda event: None))
        ) as trained:
            for order, error in trained:
                if isinstance(error, TrainingError) and is_trace(order.folder):
                    trace = load_trace(order.folder)
                    trace.config[DIVERGED] = True
                    trace.save_record()
                    if order.storage is not None:
                        settle(order)
                elif error is not None and engine.workers == 1:
                    raise error
                elif error is not None:
                    failures.append(error)
        if failures:
            raise failures[0]

    def order(self, run: Run) -> Order:
        """What an engine is asked for; a run that was begun as it is now wanted goes on."""
        config = replace(run.config, device=str(self.device))
        folder = self.runs / run.key
        keep: Keep = "weights" if run.weights else "nothing"
        return Order(
            f"{config.scenario} {config.method}",
            config,
            folder,
            self.data,
            keep,
            fresh=self._standing(folder, config, keep) != "unfinished",
            size=run.effort,
            storage=None if self.storage is None else f"{self.storage}/{run.key}",
        )

    @staticmethod
    def _standing(folder: Path, config: Config, keep: Keep) -> Standing:
        try:
            return standing(folder, config, keep)
        except TraceError:
            return "other"  # damaged: it is trained again

    def _bring(self, run: Run) -> None:
        """What shared storage has of a run, if it was not looked at before."""
        if self.storage is None or run.key in self._brought:
            return
        self._brought.add(run.key)
        order = self.order(run)
        pull(order)
        if is_trace(order.folder):
            collect(order)

    def trace(self, run: Run) -> Trace:
        """The trace of a run that has been trained."""
        trace = load_trace(self.runs / run.key)
        self.used[run.key] = trace
        return trace

    def has_looked(self, look: Look, run: Run) -> bool:
        """Whether `looked` knows what it would find."""
        return self._known(look, run) is not None

    def looked(self, look: Look, run: Run) -> Any:
        """What an artefact finds in a run's weights: found once and kept beside its trace.

        Arguments:
            look: what finds it.
            run: it has been trained, with weights unless it was looked at before.
        """
        self.trace(run)
        glance = self._known(look, run)
        if glance is None:
            started = time.perf_counter()
            found = rounded(look.find(self, run))
            seconds = time.perf_counter() - started
            glance = Glance(found, seconds, versions(self.device))
            write_beside(self.runs / run.key, look.name, self._made_as(look), asdict(glance))
        self.glances.append(glance)
        return glance.found

    def _known(self, look: Look, run: Run) -> Glance | None:
        plain = read_beside(self.runs / run.key, look.name, self._made_as(look))
        try:
            glance = None if plain is None else Glance(**plain)
        except TypeError:
            return None
        return glance if glance is not None and glance.is_sound else None

    def _made_as(self, look: Look) -> list[Any]:
        return [look.version, self.scale.name]

    def measurable(self, parts: Iterable[str]) -> list[str]:
        """Those parts of the artefact being measured of which everything is there."""
        return [part for part in parts if part not in self.lacking]

    def begin(self, lacking: Sequence[str]) -> None:
        """Begin to measure another artefact: forget which runs were used.

        Arguments:
            lacking: its parts that are to be left out.
        """
        self.lacking = lacking
        self.used.clear()
        self.glances.clear()

    def scenario(self, config: Config) -> Scenario:
        """The tasks of a run."""
        options = ScenarioOptions(
            **{f.name: getattr(config, f.name) for f in fields(ScenarioOptions)}
        )
        known = self._scenarios.get(options)
        if known is None or known[0] != config.scenario:
            known = config.scenario, build_scenario(config.scenario, config, self.data)
            self._scenarios = {options: known}  # the latest: images take room
        return known[1]

    def untrained(self, config: Config) -> Replay:
        """Networks as they are before training, and a method that can remember tasks there."""
        return Replay(config, self.scenario(config), None, self.device)

    def replay(self, run: Run, config: Config | None = None) -> Replay:
        """The networks of a run after each task, and the memory of a method there.

        Arguments:
            run: whose weights.
            config: of the method that remembers; the run's own if None.
        """
        config = config or run.config
        if config.storage == "bfloat16":  # in which a basis is orthonormal to three digits only
            config = replace(config, storage="dense")
        return Replay(config, self.scenario(config), self.trace(run), self.device)
