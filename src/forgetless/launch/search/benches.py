"""Where the trials of a search are trained: by name on an engine, or a script's own tasks here."""

import re
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, final

import torch

from forgetless.data import Scenario
from forgetless.data.held_out import HeldOutTasks
from forgetless.launch.engines import Engine, Event, Order, Watch, train
from forgetless.launch.runs import Config, resolve
from forgetless.launch.search.space import Candidate, Settings, described, key, options_of
from forgetless.methods import Method
from forgetless.support.provenance import digest_of
from forgetless.support.validation import TrainingError, select_options
from forgetless.trace import INCIDENTAL, Trace, load_trace
from forgetless.training.fit import fit, resolve_device
from forgetless.training.models import ModelSource
from forgetless.training.settings import Training

Asked = tuple[Candidate, Settings]
# Settings that say how a run is carried out, or that the search decides by itself.
NOT_SEARCHED = INCIDENTAL | {"seeds", "device", "validation_per_class", "validation_seed"}


class Bench(Protocol):
    """Trains trials."""

    def check(self, asked: Asked) -> None:
        """Reject settings that cannot be trained with."""
        ...

    def options(self, candidate: Candidate) -> dict[str, Any]:
        """All options of a method, but for those that are searched."""
        ...

    def common(self, candidate: Candidate) -> dict[str, Any]:
        """The settings of its runs that are no options of the method, nor searched."""
        ...

    @property
    def device(self) -> torch.device:
        """Where runs are trained."""
        ...

    def trained(
        self, asked: Sequence[Asked], folder: Path
    ) -> Generator[tuple[int, Trace | TrainingError]]:
        """The runs in the order in which they end, by their numbers.

        Arguments:
            folder: for the runs under way, if they need one.
        """
        ...


def place_of(asked: Asked) -> str:
    """The folder of a trial's run."""
    candidate, settings = asked
    words = re.sub(r"[^\w.=,-]+", "_", described(settings).replace(", ", ",").replace(" ", "="))
    return f"{candidate.name}/{words[:80]}-{digest_of(key(settings))[:6]}"


def _unwatched(event: Event) -> None:
    """Show nothing."""


@final
@dataclass(frozen=True)
class NamedRuns:
    """Runs of a scenario and methods that have names, on any engine.

    Arguments:
        scenario: its name, or my_file.py:tasks.
        given: settings of all runs by name.
        data: folder with datasets, or None.
        engine: trains the runs.
        watch: called with what happens to them.
        checkpoint_every: minutes between checkpoints within a task.
    """

    scenario: str
    given: Mapping[str, Any]
    data: Path | None
    engine: Engine
    watch: Watch = _unwatched
    checkpoint_every: float = 5.0

    def config(self, asked: Asked) -> Config:
        """The configuration of a trial's runs."""
        candidate, settings = asked
        own, others = candidate.parts(settings)
        return resolve(self.scenario, candidate.source, own, **{**self.given, **others})

    def check(self, asked: Asked) -> None:
        self.config(asked).build_method()

    def options(self, candidate: Candidate) -> dict[str, Any]:
        searched = {d.name for d in candidate.space}
        options = self.config((candidate, _first(candidate))).options
        return {name: value for name, value in options.items() if name not in searched}

    def common(self, candidate: Candidate) -> dict[str, Any]:
        config = self.config((candidate, _first(candidate)))
        of_runs = {f.name for f in fields(Config)} - {"options"}
        own = set(options_of(candidate.kind)) - of_runs
        own |= {f"{candidate.name}_{name}" for name in options_of(candidate.kind)}
        own |= {"method", "method_from", "method_label"} | {d.name for d in candidate.space}
        return {name: value for name, value in config.as_dict().items() if name not in own}

    @property
    def device(self) -> torch.device:
        return self.engine.device(str(self.given.get("device") or "auto"))

    def trained(
        self, asked: Sequence[Asked], folder: Path
    ) -> Generator[tuple[int, Trace | TrainingError]]:
        orders = [
            Order(
                f"{one[0].name} {described(one[1])}".strip(),
                self.config(one),
                folder / place_of(one),
                self.data,
                "nothing",
                self.checkpoint_every,
            )
            for one in asked
        ]
        number = {order.folder: n for n, order in enumerate(orders)}
        with closing(train(orders, self.engine, self.watch)) as finished:
            for order, error in finished:
                if error is not None and not isinstance(error, TrainingError):
                    raise error
                yield number[order.folder], error or load_trace(order.folder)
                shutil.rmtree(order.folder, ignore_errors=True)  # the search's file has the result


@final
@dataclass(frozen=True)
class OwnRuns:
    """Runs of tasks and a model that a script made, in this process, one after another.

    Arguments:
        tasks: the scenario.
        model: the model, as for `fit`.
        given: settings of training by name, and those of the held-out samples.
        seeds: of each trial.
    """

    tasks: Scenario
    model: ModelSource | None
    given: Mapping[str, Any]
    seeds: tuple[int, ...]

    def check(self, asked: Asked) -> None:
        self._made(asked)

    def options(self, candidate: Candidate) -> dict[str, Any]:
        method, _ = self._made((candidate, _first(candidate)))
        searched = {d.name for d in candidate.space}
        return {
            name: getattr(method, f.name)
            for name, f in options_of(candidate.kind).items()
            if name not in searched
        }

    def common(self, candidate: Candidate) -> dict[str, Any]:
        _, training = self._made((candidate, _first(candidate)))
        searched = {d.name for d in candidate.space}
        return {n: v for n, v in vars(training).items() if n not in searched}

    @property
    def device(self) -> torch.device:
        return resolve_device(str(self.given.get("device") or "auto"))

    @cached_property
    def _held_out(self) -> Scenario:
        if self.tasks.measured_on == "validation":
            return self.tasks
        seed = self.given.get("validation_seed", 0)
        return HeldOutTasks(self.tasks, self.given["validation_per_class"], seed)

    def _made(self, asked: Asked) -> tuple[Method[Any], Training]:
        candidate, settings = asked
        own, others = candidate.parts(settings)
        known, kind = options_of(candidate.kind), _maker(candidate.kind)
        values = {n: v for n, v in {**self.given, **others}.items() if v is not None}
        return kind(**{known[n].name: v for n, v in own.items()}), select_options(Training, values)

    def trained(
        self, asked: Sequence[Asked], folder: Path
    ) -> Generator[tuple[int, Trace | TrainingError]]:
        for number, one in enumerate(asked):
            method, training = self._made(one)
            options: dict[str, Any] = {"device": self.device, "keep": "nothing"}
            try:
                yield (
                    number,
                    fit(
                        self._held_out,
                        method,
                        self.model,
                        seeds=self.seeds,
                        training=training,
                        **options,
                    ),
                )
            except TrainingError as error:
                yield number, error


def _first(candidate: Candidate) -> Settings:
    """One of the settings of a grid."""
    return {dimension.name: dimension.values[0] for dimension in candidate.space}


def _maker(kind: type[Method[Any]]) -> Callable[..., Method[Any]]:
    return kind
