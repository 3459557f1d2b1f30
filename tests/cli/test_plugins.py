"""Methods, scenarios and models of one's own: in a file, or in an installed package."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from forgetless import load_trace
from forgetless.support import plugins
from tests.conftest import forgetless
from tests.launch.engines.problems import assert_alike

LINEAR = ("--linearised", "--components")

SOURCE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from forgetless import Method, TensorScenario
from forgetless.support.validation import option, real


@dataclass(frozen=True)
class Shrink(Method[None]):
    """Shorter steps."""

    name: ClassVar[str] = "shrink"
    acts_on = "gradient"
    threshold: float = option(0.5, "The length of a step.", accepted=real(0))
    lr: int = 3
    twice: bool = False
    kind: str = option("all", "How it shrinks.", choices=("all", "some"))

    def init(self, view):
        return None

    def update(self, g, state, view):
        return (2 if self.twice else 1) * self.threshold * g, state

    def consolidate(self, state, view, task):
        return state


@dataclass(frozen=True, kw_only=True)
class Needy(Shrink):
    name: ClassVar[str] = "needy"
    strength: float


@dataclass(frozen=True)
class Outside(Shrink):
    name: ClassVar[str] = "../outside"


@dataclass(frozen=True)
class Mistaken(Shrink):
    name: ClassVar[str] = "mistaken"

    def consolidate(self, state, view, task):
        return state.nothing_of_the_kind


class NoDataclass(Method[None]):
    name: ClassVar[str] = "bare"

    def init(self, view):
        return None


class Leaves(Shrink):
    name: ClassVar[str] = "leaves"

    def update(self, g, state, view):
        raise SystemExit(0)


class TwoHeads(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.body = nn.Linear(inputs, 5)
        self.a, self.b = nn.Linear(5, outputs // 2), nn.Linear(5, outputs - outputs // 2)

    def forward(self, x):
        h = self.body(x.flatten(1)).relu()
        return torch.cat([self.a(h), self.b(h)], 1)


class Few(nn.Linear):
    def __init__(self, inputs):
        super().__init__(inputs, 3)


def split_tasks(tasks=2):
    y = torch.arange(24) % 2
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
    return TensorScenario([((x, y), (x, y))] * tasks, setting="task")


def make_tasks(tasks=3, train_per_class=8):
    """Clouds of points."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(tasks):
        y = torch.arange(3 * train_per_class) % 3
        x = torch.randn(len(y), 6, generator=generator) + y.unsqueeze(1)
        pairs.append(((x, y), (x, y)))
    return TensorScenario(pairs, name="clouds")


class Net(nn.Sequential):
    """One hidden layer."""

    def __init__(self, inputs, outputs, hidden=7):
        super().__init__(
            nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
        )


class Unlike:
    pass
'''
QUICK = ["--tasks", "2", "--epochs", "1", "--lr", "0.1"]
FILES = ["my_file.py:make_tasks", "--model", "my_file.py:Net", *QUICK]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_file.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def installed(folder, monkeypatch):
    """A package with plug-ins, of which one cannot be imported, as pip leaves it on the path."""
    site = folder / "site"
    (site / "their_package-1.0.dist-info").mkdir(parents=True)
    (site / "their_package-1.0.dist-info" / "METADATA").write_text("Name: their-package\n")
    (site / "their_package-1.0.dist-info" / "entry_points.txt").write_text(
        "[forgetless.methods]\nshrink = their_package:Shrink\nbroken = their_broken:Method\n"
        "[forgetless.scenarios]\nclouds = their_package:make_tasks\n"
        "[forgetless.models]\nnet = their_package:Net\n"
    )
    (site / "their_package.py").write_text(SOURCE)
    (site / "their_broken.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    plugins.installed.cache_clear()
    yield
    plugins.installed.cache_clear()
    sys.modules.pop("their_package", None)


def test_a_file_has_method_tasks_and_model(folder, capsys):
    compare = ["compare", *FILES, "--methods", "sgd,my_file.py:Shrink", "--set", "threshold=0.25"]
    status, out, err = forgetless([*compare, "--set", "lr=4", "--out", "a"], capsys)
    assert (status, err) == (0, "")
    assert "shrink" in out
    trace = load_trace(folder / "a" / "shrink")
    assert (trace.scenario, trace.method, len(trace.tasks)) == ("make_tasks", "shrink", 2)
    noted = {"threshold": 0.25, "shrink_lr": 4, "lr": 0.1, "method_from": "my_file:Shrink"}
    noted |= {"model": "Net", "model_from": "my_file:Net", "hidden": 7, "train_per_class": 8}
    assert trace.config.items() >= noted.items()
    # Steps of a quarter are those of a quarter of the learning rate.
    slower = [w if w != "0.1" else "0.025" for w in FILES]
    assert forgetless(["run", *slower, "--method", "sgd", "--out", "b"], capsys)[0] == 0
    np.testing.assert_array_equal(trace.accuracy, load_trace(folder / "b").accuracy)
    whole = load_trace(folder / "a" / "sgd")
    assert not (whole.weights(0, 1)["1.weight"] == trace.weights(0, 1)["1.weight"]).all()


def test_workers_load_the_same_file_and_the_command_resumes(folder, capsys):
    compare = ["compare", *FILES, "--seeds", "2", "--method", "sgd", "--method"]
    compare += ["my_file.py:Shrink", "--set", "twice=yes", "--json", "--out"]
    status, expected, _ = forgetless([*compare, "a"], capsys)
    assert status == 0
    status, found, _ = forgetless([*compare, "b", "--jobs", "2"], capsys)
    assert status == 0
    assert [one["method"] for one in json.loads(found)] == ["sgd", "shrink"]
    for method in ("sgd", "shrink"):
        assert_alike(folder / "b" / method, folder / "a" / method)
    status, again, _ = forgetless([*compare, "a", "--resume"], capsys)
    assert (status, again) == (0, expected)
    assert forgetless([*compare, "a", "--resume", "--set", "threshold=0.1"], capsys)[0] == 2


def test_they_show_in_the_report_and_the_forecast(folder, capsys):
    compare = ["compare", *FILES, "--methods", "sgd,my_file.py:Shrink", "--analyse", "--out", "a"]
    status, out, _ = forgetless(compare, capsys)
    assert status == 0
    assert "could not be analysed" not in out
    assert '"shrink"' in (folder / "a" / "report.html").read_text("utf-8")
    (folder / "both.py").write_text(
        "from my_file import *\ndef both(): return make_tasks(2), Net(6, 3)"
    )
    forecast = [
        "forecast",
        "a/shrink",
        "--from",
        "both.py:both",
        "--linearised",
        "--components",
        "",
        "--json",
    ]
    status, out, err = forgetless([*forecast, "--quick"], capsys)
    assert status == 0, err
    assert json.loads(out)["scenario"] == "make_tasks"


def test_a_package_is_listed_and_used_by_name(installed, folder, capsys):
    status, out, _ = forgetless(["list"], capsys)
    assert status == 0
    for line in (
        "  clouds                  Clouds of points.",
        "  net                     One hidden",
    ):
        assert line in out
    assert "  shrink                  Shorter steps." in out
    assert "  broken                  cannot be used: the method 'broken' of their-package" in out
    quick = ["--model", "net", *QUICK, "--jobs", "2", "--seeds", "2", "--out", "a", "--analyse"]
    methods = ["--methods", "sgd,shrink", "--set", "threshold=0.5"]
    status, out, err = forgetless(["compare", "clouds", *methods, *quick], capsys)
    assert status == 0, err
    assert "could not be analysed" not in out
    config = load_trace(folder / "a" / "shrink").config
    assert config.items() >= {"scenario": "clouds", "model": "net", "threshold": 0.5}.items()
    # What is installed is made again from a trace, without --from.
    forecast = ["forecast", "a/shrink", *LINEAR, "", "--quick", "--json"]
    assert forgetless(forecast, capsys)[0] == 0


def test_a_broken_package_is_one_sentence_where_it_is_used(installed, capsys):
    status, _, err = forgetless(["run", "rotated-digits", "--method", "broken"], capsys)
    assert (status, err.count("\n")) == (2, 1)
    assert "the method 'broken' of their-package cannot be imported: ModuleNotFoundError" in err


def test_list_shows_the_options_of_a_method(capsys):
    status, out, _ = forgetless(["list", "my_file.py:Shrink"], capsys)
    assert status == 0
    assert "--set threshold=…" in out
    assert "The length of a step. [default: 0.5]" in out
    assert "How it shrinks. all or some. [default: all]" in out
    assert "--set memory=…" in forgetless(["list", "pca-ogd"], capsys)[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--method", "my_file.py:Nope"], "my_file.py has no Nope"),
        (["--method", "nowhere.py:X"], "nowhere.py is not a file"),
        (["--method", "my_file.py"], "--method must be FILE:NAME, such as script.py:make"),
        (
            ["--method", "my_file.py:Unlike"],
            "must be a subclass of Method, and is the class Unlike",
        ),
        (["--method", "my_file.py:Outside"], "the name of Outside must be letters, digits and"),
        (["--method", "my_file.py:NoDataclass"], "NoDataclass has no consolidate, update"),
        (["--method", "my_file.py:Needy"], "needy needs --set strength=…"),
        (
            ["--method", "pca-odg"],
            "unknown method 'pca-odg': did you mean 'pca-ogd'? There are",
        ),
        (
            ["--method", "my_file.py:Shrink", "--set", "treshold=1"],
            "unknown option of Shrink 'treshold': did you mean 'threshold'? There are threshold,",
        ),
        (["--method", "my_file.py:Shrink", "--set", "threshold=x"], "must be a number, not 'x'"),
        (["--method", "my_file.py:Shrink", "--set", "lr=0.5"], "lr must be a whole number"),
        (["--method", "my_file.py:Shrink", "--set", "threshold=-1"], "--set threshold must be a"),
        (["--method", "my_file.py:Shrink", "--set", "twice=9"], "twice must be true or false"),
        (["--method", "my_file.py:Shrink", "--memory", "5"], "shrink does not use --memory"),
        (
            ["--method", "my_file.py:Shrink", "--set", "threshold=1", "--set", "threshold=2"],
            "--set must be given once for each option, and threshold has a value, not 'thres",
        ),
        (["--method", "leaves.py:Leaves"], "leaves.py cannot be executed: SystemExit: 3"),
        (["--method", "sgd", "--set", "a=1"], "unknown option of sgd 'a'; there are none"),
        (["--method", "sgd", "--set", "a"], "--set must be NAME=VALUE"),
        (["--method", "sgd", "--model", "my_file.py:Unlike"], "must be a torch.nn.Module or a"),
        (["--method", "sgd", "--model", "mpl"], "unknown model 'mpl': did you mean 'mlp'?"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence, folder, capsys):
    (folder / "leaves.py").write_text("raise SystemExit(3)")
    before = sorted(folder.rglob("*"))
    status, out, err = forgetless(["run", "rotated-digits", *QUICK, *words], capsys)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert sentence in err
    assert [f for f in sorted(folder.rglob("*")) if "__pycache__" not in str(f)] == before


@pytest.mark.parametrize(
    ("scenario", "sentence"),
    [
        ("my_file.py:Net", "the scenario"),
        ("my_file.py:Unlike", "must be a Scenario or a function that returns one"),
        ("rotated-digit", "unknown scenario 'rotated-digit': did you mean 'rotated-digits'?"),
    ],
)
def test_mistakes_in_scenarios_are_one_sentence(scenario, sentence, capsys):
    status, out, err = forgetless(["run", scenario, "--method", "sgd"], capsys)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert sentence in err


def test_no_file_is_executed_because_a_trace_names_it(folder, capsys):
    quick = ["--tasks", "2", "--epochs", "1", "--train-per-class", "5", "--out", "a"]
    assert forgetless(["run", "rotated-digits", "--method", "sgd", *quick], capsys)[0] == 0
    (folder / "trap.py").write_text("open('sprung', 'w').close()\n")
    file = folder / "a" / "trace.json"
    record = json.loads(file.read_text("utf-8"))
    for name in ("scenario", "method", "model"):
        trapped = {**record, "config": {**record["config"], name: "trap.py:x"}}
        file.write_text(json.dumps(trapped | {name: "trap.py:x"}), "utf-8")
        forgetless(["report", "a", "--analyse"], capsys)
        forgetless(["forecast", "a"], capsys)
        assert not (folder / "sprung").exists(), name


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("name", ["Mistaken", "Leaves"])
def test_a_mistake_in_the_file_is_shown_with_its_line_and_not_retried(
    jobs, name, folder, capsys, monkeypatch
):
    compare = ["compare", *FILES, "--methods", f"my_file.py:{name}", "--seeds", "2"]
    line = {"Mistaken": "return state.nothing_of_the_kind", "Leaves": "raise SystemExit(0)"}[name]
    what = {"Mistaken": "AttributeError: 'NoneType' object", "Leaves": "SystemExit: 0"}[name]
    where = {"Mistaken": "consolidate", "Leaves": "update"}[name]
    number = 1 + [text.strip() for text in SOURCE.splitlines()].index(line)
    status, _, err = forgetless([*compare, "--jobs", jobs, "--out", "a"], capsys)
    sentence = f"forgetless: {folder}/my_file.py, line {number}, in {where}: {what}"
    assert (status, sentence in err) == (3, True)
    assert "attempt 2" not in err
    assert line not in err
    monkeypatch.setenv("FORGETLESS_DEBUG", "1")
    status, _, err = forgetless([*compare, "--jobs", jobs, "--out", "b"], capsys)
    assert (status, sentence in err, line in err) == (3, True, True)


def test_an_error_of_the_package_itself_has_a_traceback(capsys, monkeypatch):
    monkeypatch.setattr("forgetless.cli.catalogue._show_group", None)
    status, _, err = forgetless(["list"], capsys)
    assert (status, "Traceback" in err) == (3, True)
    assert err.endswith("forgetless: an error in forgetless itself\n")


def test_several_heads_are_named_on_the_command_line(folder, capsys):
    run = ["run", "my_file.py:split_tasks", "--method", "ogd", *QUICK, "--out", "a"]
    status, _, err = forgetless([*run, "--model", "my_file.py:TwoHeads"], capsys)
    assert (status, "--heads head." in err) == (2, True)
    run += ["--model", "my_file.py:TwoHeads", "--heads", "a., b."]
    status, _, err = forgetless(run, capsys)
    assert status == 0, err
    trace = load_trace(folder / "a")
    assert trace.config["heads"] == "a.,b."
    first, last = (trace.weights(0, t) for t in (0, 1))
    # The second task leaves the first one's head alone, and trains its own.
    assert np.array_equal(first["a.weight"], last["a.weight"])
    assert not np.array_equal(first["b.weight"], last["b.weight"])
    assert forgetless([*run, "--resume"], capsys)[0] == 0
    assert "holds another run" in forgetless([*run[:-1], "a.,b", "--resume"], capsys)[2]
    wrong = [*run[:-1], "c.", "--overwrite"]
    assert "heads must be the beginning of a parameter's name" in forgetless(wrong, capsys)[2]
    few = ["run", "my_file.py:split_tasks", "--method", "ogd", "--model", "my_file.py:Few"]
    assert "the model must give 4 outputs per sample" in forgetless(few, capsys)[2]


@pytest.mark.filterwarnings("ignore:.*resumes from the checkpoint before it")
def test_four_methods_outside_the_package_are_the_same_in_workers_and_after_a_kill(folder, capsys):
    """In two processes, and in one that is killed and resumed: the same bit for bit."""
    file = Path(__file__).parents[2] / "examples" / "own_methods.py"
    methods = ",".join(f"{file}:{name}" for name in ("OWM", "DERPP", "LwF", "SI"))
    compare = ["compare", "rotated-digits", "--methods", methods, "--set", "si-strength=0.5"]
    compare += ["--tasks", "3", "--epochs", "3", "--train-per-class", "20", "--no-analyse"]
    compare += ["--checkpoint-every", "1e-9", "--out"]
    status, out, err = forgetless([*compare, "whole", "--jobs", "2"], capsys)
    assert status == 0, err
    killed = subprocess.Popen([sys.executable, "-m", "forgetless", *compare, "killed"])
    until = time.monotonic() + 120
    while not list(folder.glob("killed/lwf/checkpoint/manifest-*")):
        assert killed.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert load_trace(folder / "killed" / "owm").status == "complete"
    assert not (folder / "killed" / "si").exists()
    status, out, err = forgetless([*compare, "killed"], capsys)
    assert status == 0, err
    page = (folder / "killed" / "report.html").read_text("utf-8")
    for name in ("owm", "der++", "lwf", "si"):
        assert_alike(folder / "killed" / name, folder / "whole" / name)
        label = load_trace(folder / "whole" / name).method
        assert label in out.lower()
        assert f'"{label}"' in page
