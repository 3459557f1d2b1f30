"""A search as a file that people can read: the choices, every trial, and how they were made."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from forgetless.launch.search.space import Settings, key, options_of
from forgetless.methods import Method, method_class
from forgetless.support.files import write_atomically
from forgetless.support.statistics import mean
from forgetless.support.validation import TraceError, select_options
from forgetless.trace import Trace, average_accuracy, forgetting, nulls
from forgetless.trace.experiment import plain
from forgetless.training.settings import Training

SEARCH_FILE = "search.json"
FORMAT = 1
_DIGITS = 4  # of accuracies
# Parts of a run's fingerprint that all trials have in common, and what differs if they do not.
_SAME = {
    "scenario": "the tasks",
    "data": "their data",
    "model": "the model's layers",
    "start": "the model",
}
_WIDTH = 100  # characters of a line


@final
@dataclass(frozen=True)
class Trial:
    """One setting of one method, trained with all seeds of the search.

    Attributes:
        method: its name.
        settings: the options that were searched.
        average_accuracy, forgetting: of each seed, on the held-out images; empty if it diverged.
        seconds: of all seeds.
        error: why it has no accuracy.
        made_with: the number of an entry in `Search.made_with`.
    """

    method: str
    settings: Settings
    average_accuracy: tuple[float, ...] = ()
    forgetting: tuple[float, ...] = ()
    seconds: float = 0.0
    error: str = ""
    made_with: int = 0

    @property
    def score(self) -> float:
        """The mean over seeds of A_T; −∞ if it diverged."""
        return mean(self.average_accuracy) if self.average_accuracy else -math.inf

    @classmethod
    def of(cls, method: str, settings: Settings, trace: Trace, made_with: int) -> "Trial":
        """From the trace of its runs."""
        metrics = (trace.per_seed(metric) for metric in (average_accuracy, forgetting))
        found = [tuple(float(v) for v in np.round(values, _DIGITS)) for values in metrics]
        seconds = round(trace.timings.get("total", 0.0), 2)
        return cls(method, settings, found[0], found[1], seconds, made_with=made_with)


@final
@dataclass(frozen=True)
class Choice:
    """The best settings of a method, and all that `fit` needs to train it with them.

    Attributes:
        trial: with the highest score.
        limits: which of its settings lie at an end of what was tried.
        trials: how many settings were tried.
        method: with these settings.
        training: with these settings.
    """

    trial: Trial
    limits: tuple[str, ...]
    trials: int
    method: Method[Any]
    training: Training

    @property
    def settings(self) -> Settings:
        """The options that were searched, at their best values."""
        return self.trial.settings

    @property
    def score(self) -> float:
        """The mean over seeds of A_T on the held-out images."""
        return self.trial.score


@final
@dataclass
class Search:
    """What was searched, how, and what was found.

    Attributes:
        scenario: as it was named.
        protocol: seeds, held-out images and sampler.
        given: the settings of all runs that were given, as they were given.
        settings: those that all runs used.
        methods: for each method its source (with a checksum of the code of one's own), the options
            that were given and those of its runs, and the values that were searched by option.
        trials: in the order in which they were proposed.
        limits: method → which of its best settings lie at an end of what was tried.
        made_with: versions of the program, its libraries and the device.
        fingerprint: checksums of the tasks, their data and the model.
        status: "complete" or "unfinished".
        path: its file, if it has one.
    """

    scenario: str
    protocol: dict[str, Any]
    given: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    limits: dict[str, list[str]] = field(default_factory=dict)
    made_with: list[dict[str, str]] = field(default_factory=list)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    status: str = "unfinished"
    path: Path | None = None
    kinds: dict[str, type[Method[Any]]] = field(default_factory=dict, repr=False)

    @property
    def best(self) -> dict[str, Choice]:
        """The choice for each method; one that diverged in every trial has none."""
        found = {}
        for name in self.methods:
            own = [trial for trial in self.trials if trial.method == name]
            best = max(own, key=lambda trial: trial.score, default=None)
            if best is not None and best.average_accuracy:
                found[name] = self._choice(best, len(own))
        return found

    def _choice(self, trial: Trial, count: int) -> Choice:
        of = self.methods[trial.method]
        kind = self.kinds.get(trial.method) or method_class(of["source"])
        known = options_of(kind)
        values = {**of["options"], **{n: v for n, v in trial.settings.items() if n in known}}
        method: Any = kind
        others = {n: v for n, v in trial.settings.items() if n not in known}
        return Choice(
            trial,
            tuple(self.limits.get(trial.method, ())),
            count,
            method(**{known[name].name: v for name, v in values.items() if name in known}),
            select_options(Training, {**self.settings, **self.given, **others}),
        )

    def result(self, method: str, settings: Settings) -> Trial | None:
        """The trial of a method with these settings."""
        wanted = key(settings)
        own = (trial for trial in self.trials if trial.method == method)
        return next((trial for trial in own if key(trial.settings) == wanted), None)

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it this search and no other, flat."""
        methods = {
            f"{name} {what}": entry[what]
            for name, entry in self.methods.items()
            for what in ("source", "code", "given", "searched")
        }
        settings = {f"--{name}": value for name, value in self.given.items()}
        found = {"scenario": self.scenario, **self.protocol, **settings, **methods}
        written: dict[str, Any] = json.loads(json.dumps(found, default=plain))
        return written

    def note_fingerprint(self, trace: Trace) -> None:
        """Reject a run of other tasks, data or model than those before."""
        found = {part: trace.fingerprint.get(part) for part in _SAME}
        first = self.fingerprint or found
        changed = [words for part, words in _SAME.items() if first[part] != found[part]]
        if changed:
            raise TraceError(
                f"{self.path} was searched with others: {', '.join(changed)} differ; choose "
                "another folder or add --overwrite"
            )
        self.fingerprint = found

    def note_versions(self, versions: dict[str, str]) -> int:
        """The number of these versions in `made_with`."""
        if versions not in self.made_with:
            self.made_with.append(versions)
        return self.made_with.index(versions)

    def save(self, file: Path) -> None:
        """Write the file."""
        self.path = file
        text = self.as_text()
        write_atomically(file, lambda place: place.write_text(text, "utf-8"))

    def as_text(self) -> str:
        """The file: a line for each method, choice and trial."""
        best = {
            name: {
                "settings": choice.settings,
                "average_accuracy": round(choice.score, _DIGITS),
                "trials": choice.trials,
                "limits": choice.limits,
            }
            for name, choice in self.best.items()
        }
        parts: dict[str, Any] = {
            "format": FORMAT,
            "scenario": self.scenario,
            "status": self.status,
            "score": "A_T on the held-out images, mean over seeds, %",
            "best": best,
            "protocol": self.protocol,
            "given": self.given,
            "settings": self.settings,
            "methods": self.methods,
            "trials": [_brief(trial) for trial in self.trials],
            "made_with": self.made_with,
            "fingerprint": self.fingerprint,
        }
        lines = [f"{json.dumps(name)}: {_lines(part)}" for name, part in parts.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _brief(trial: Trial) -> dict[str, Any]:
    """A trial without what it does not have."""
    return {name: value for name, value in asdict(trial).items() if value not in ((), "")}


def _lines(part: Any) -> str:
    """JSON with a line for each entry of a list or of nested objects."""
    nested = isinstance(part, dict) and any(isinstance(v, dict) for v in part.values())
    if nested or (isinstance(part, dict) and len(_compact(part)) > _WIDTH):
        rows = [f"{json.dumps(name)}: {_compact(value)}" for name, value in part.items()]
        return "{\n " + ",\n ".join(rows) + "\n}"
    if isinstance(part, list) and part:
        return "[\n " + ",\n ".join(map(_compact, part)) + "\n]"
    return _compact(part)


def _compact(value: Any) -> str:
    return json.dumps(nulls(value), allow_nan=False, default=plain)


def load_search(path: str | Path) -> Search:
    """Read a search from its file, or from the folder that has it."""
    given = Path(path)
    file = given / SEARCH_FILE if given.is_dir() else given
    try:
        record = json.loads(file.read_text("utf-8"))
        if record["format"] != FORMAT:
            raise TraceError(f"{file} has format {record['format']!r}; this version reads {FORMAT}")
        for settings in (record["settings"], record["given"]):
            if not isinstance(settings.get("model", ""), str):
                raise ValueError("its model has no name")
        methods = {str(name): _method_entry(of) for name, of in record["methods"].items()}
        trials = [_trial(entry, methods) for entry in record["trials"]]
        limits = {str(n): list(map(str, of["limits"])) for n, of in record["best"].items()}
        return Search(
            str(record["scenario"]),
            dict(record["protocol"]),
            dict(record["given"]),
            methods,
            dict(record["settings"]),
            trials,
            limits,
            [dict(versions) for versions in record["made_with"]],
            dict(record["fingerprint"]),
            str(record["status"]),
            file,
        )
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"{file} cannot be read: {reason}") from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{file} is not a search: {type(error).__name__} {error}") from error


def _method_entry(of: Mapping[str, Any]) -> dict[str, Any]:
    parts = {what: dict(of[what]) for what in ("given", "options", "searched")}
    return {"source": str(of["source"]), "code": str(of.get("code", "")), **parts}


def _trial(entry: Mapping[str, Any], methods: Mapping[str, Any]) -> Trial:
    if entry["method"] not in methods:
        raise ValueError(f"{entry['method']!r} is not one of its methods")
    accuracy, forgot = (
        tuple(map(float, entry.get(n, ()))) for n in ("average_accuracy", "forgetting")
    )
    if not all(map(math.isfinite, accuracy)):
        raise ValueError("an accuracy is not finite")
    return Trial(
        str(entry["method"]),
        dict(entry["settings"]),
        accuracy,
        forgot,
        float(entry.get("seconds", 0)),
        str(entry.get("error", "")),
        int(entry.get("made_with", 0)),
    )
