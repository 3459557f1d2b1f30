"""The runs that artefacts need: told apart by what decides their result, trained once, kept."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

from forgetless.beside import read_beside, write_beside
from forgetless.config import Config
from forgetless.data import Scenario, ScenarioOptions, build_scenario
from forgetless.engines import Engine, InProcess, Order, Watch, collect, pull, settle, train
from forgetless.errors import ForgetlessError, TraceError, TrainingError
from forgetless.fit import Keep, resolve_device
from forgetless.methods import build_method
from forgetless.methods.orthogonal import Orthogonal
from forgetless.models import ModelOptions
from forgetless.paper.numbers import DIVERGED, diverged
from forgetless.paper.replay import Replay
from forgetless.paper.scale import Scale
from forgetless.paper.store import Results, rounded
from forgetless.provenance import versions
from forgetless.runs import standing
from forgetless.trace import Trace, is_trace, load_trace
from forgetless.training import Training

_LOOKS = 1  # version of what is found in weights: another one finds it anew
# What a step of other methods takes, in steps of plain SGD.
_EFFORTS = {"ewc": 1.2, "joint": 2.0, "a-gem": 4.5, "factored": 5.0, "gem-nt": 20.0, "gem": 60.0}
_INPUTS = {"mlp": 1024, "lenet": 3200}  # of the largest layer
_BYTES_IN_A_STEP = 2.4e8  # that a GPU reads while it does a step of plain SGD
# How a run is carried out, which does not change what comes out.
_INCIDENTAL = {"seeds_together", "evaluate"}


@final
@dataclass(frozen=True)
class Run:
    """One scenario learned by one method with all its seeds.

    Arguments:
        config: the settings.
        weights: whether the weights after each task are wanted.
    """

    config: Config
    weights: bool = False

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, and nothing else."""
        config = self.config
        family = config.scenario.split("-")[0]
        if family != "split":  # without heads there is nothing that could go through them
            config = replace(config, agem_heads="own")
        method = build_method(config.method, config)
        if not isinstance(method, Orthogonal):
            config = replace(config, storage="dense")
        groups = (ScenarioOptions, ModelOptions, Training)
        names = {f.name for group in groups for f in fields(group)} - _INCIDENTAL
        values = asdict(config)
        return {
            "scenario": config.scenario,
            "method": {"name": config.method} | asdict(method),  # type: ignore[call-overload]
            "seeds": list(config.seed_list()),
        } | {name: values[name] for name in sorted(names)}

    @cached_property
    def key(self) -> str:
        """What tells runs apart: their scenario, method and a hash of all settings."""
        text = json.dumps(self.settings, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{self.config.scenario}-{self.config.method}-{digest}"

    @property
    def effort(self) -> float:
        """Roughly how much work it is, in steps of plain SGD, for an estimate of the time left."""
        c = self.config
        per_class = c.train_per_class or 500
        classes = c.classes_per_task if c.scenario.startswith("split") else 10
        steps = c.tasks * c.epochs * max(1, per_class * classes // c.batch_size)
        return steps * _effort_of_a_step(c)


def _effort_of_a_step(config: Config) -> float:
    """What a method's step takes, in steps of plain SGD, as seen on the paper's benchmarks.

    A projection takes as long as it takes to read the rows, on average half of those at the end.
    """
    network = 1.0 if config.model == "mlp" else 3.0
    if config.method not in ("ogd", "pca-ogd"):
        return network * _EFFORTS.get(config.method, 1.0)
    if config.storage == "factored":
        return network * _EFFORTS["factored"]
    row = (
        config.hidden * _INPUTS.get(config.model, 1000) * (2 if config.storage == "bfloat16" else 4)
    )
    rows = len(config.seed_list()) * config.tasks * config.memory / 2
    return network + rows * row / _BYTES_IN_A_STEP


Look = Callable[["Workshop", Run], Any]  # from a run's weights to what JSON can hold


@final
@dataclass(frozen=True)
class Glance:
    """What was found in a run's weights, the seconds it took, and on what it was found."""

    found: Any
    seconds: float
    versions: dict[str, str]


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
        self.used: dict[str, Trace] = {}  # by key, since the last `clear_used`
        self.glances: list[Glance] = []  # that were used, since then
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
        last = len(trace.tasks)
        kept = [folder / f"seed-{s}" / f"task-{last:02d}.safetensors" for s in trace.seeds]
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
            fresh=standing(folder, config, keep) != "unfinished",
            size=run.effort,
            storage=None if self.storage is None else f"{self.storage}/{run.key}",
        )

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

    def has_looked(self, name: str, run: Run) -> bool:
        """Whether `looked` knows what it would find."""
        return self._known(name, run) is not None

    def looked(self, name: str, run: Run, look: Look) -> Any:
        """What an artefact finds in a run's weights: found once and kept beside its trace.

        Arguments:
            name: of the artefact.
            run: it has been trained, with weights unless it was looked at before.
            look: what finds it.
        """
        self.trace(run)
        glance = self._known(name, run)
        if glance is None:
            started = time.perf_counter()
            found = rounded(look(self, run))
            seconds = time.perf_counter() - started
            glance = Glance(found, seconds, versions(self.device))
            write_beside(self.runs / run.key, name, self._made_as(), asdict(glance))
        self.glances.append(glance)
        return glance.found

    def _known(self, name: str, run: Run) -> Glance | None:
        plain = read_beside(self.runs / run.key, name, self._made_as())
        try:
            return None if plain is None else Glance(**plain)
        except TypeError:
            return None

    def _made_as(self) -> list[Any]:
        return [_LOOKS, self.scale.name]

    def clear_used(self) -> None:
        """Forget which runs were used."""
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

    def replay(self, run: Run, method: str | None = None, **settings: Any) -> Replay:
        """The networks of a run as they were after each task, and what a method made of them.

        Arguments:
            run: whose weights.
            method: which method remembers; the run's own if None.
            settings: what the method has another value for.
        """
        config = replace(run.config, method=method or run.config.method, **settings)
        return Replay(config, self.scenario(config), self.trace(run), self.device)
