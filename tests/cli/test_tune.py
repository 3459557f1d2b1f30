"""`forgetless tune`, and `compare --best` with what it chose."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from forgetless.cli import main
from forgetless.launch.search import SEARCH_FILE, load_search
from forgetless.support.files import is_locked
from tests.conftest import forgetless

pytestmark = pytest.mark.usefixtures("elsewhere")
QUICK = ["--tasks", "2", "--epochs", "1", "--train-per-class", "20"]
GRID = ["--grid", "lr=0.02,0.1", "--grid", "ewc:ewc-strength=10,100"]
TUNE = ["tune", "rotated-digits", "--methods", "sgd,ewc", *GRID, *QUICK]


def without_seconds(folder):
    record = json.loads((folder / SEARCH_FILE).read_text())
    for trial in record["trials"]:
        del trial["seconds"]
    return record


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished search's folder, and what it printed."""
    folder, out, err = tmp_path_factory.mktemp("finished"), io.StringIO(), io.StringIO()
    with (
        chdir(folder),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as stopped,
    ):
        main([*TUNE, "--out", "a"])
    assert stopped.value.code == 0
    return folder / "a", out.getvalue(), err.getvalue()


@pytest.fixture
def search(finished, tmp_path):
    """The finished search as the folder a."""
    shutil.copytree(finished[0], tmp_path / "a")
    return finished[1:]


def test_it_says_what_it_tries_and_what_it_chose(search, tmp_path):
    out, err = search
    lines = err.splitlines()
    assert lines[0] == (
        "rotated-digits: 6 trials, each with seeds 100, 101, on 4 held-out images of each class"
    )
    assert lines[1:3] == [
        "  sgd (2): lr 0.02, 0.1",
        "  ewc (4): lr 0.02, 0.1; ewc_strength 10, 100",
    ]
    assert lines[3].startswith("1 of 6: sgd lr 0.02: ")
    assert lines[-1].startswith("6 of 6: ewc lr 0.1, ewc strength 100: ")
    assert lines[-1].endswith(" s in all")
    assert "* SGD: lr 0.1 is the largest value tried" in out
    assert "Beyond the end of a grid there may be a better value: --extend goes on there." in out
    assert out.endswith(f"  forgetless compare rotated-digits --best a/{SEARCH_FILE}\n")
    assert load_search(tmp_path / "a").status == "complete"


def test_several_jobs_write_the_same_file_and_it_is_found_again(search, capsys, tmp_path):
    status, _, err = forgetless([*TUNE, "--jobs", "2"], capsys)
    assert status == 0
    assert len([line for line in err.splitlines() if " of 6: " in line]) == 6
    folder = tmp_path / "runs" / "rotated-digits-tune"
    assert without_seconds(folder) == without_seconds(tmp_path / "a")
    status, out, err = forgetless([*TUNE, "--json"], capsys)
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["out"] == f"runs/rotated-digits-tune/{SEARCH_FILE}"
    assert found["best"]["sgd"]["settings"] == {"lr": 0.1}
    assert forgetless([*TUNE, "--seeds", "1"], capsys)[0] == 0
    assert sorted(f.name for f in (tmp_path / "runs").iterdir()) == [
        "rotated-digits-tune", "rotated-digits-tune-2",
    ]  # fmt: skip


def test_a_killed_search_resumes(search, tmp_path, capsys):
    command = [sys.executable, "-m", "forgetless", *TUNE, "--out", "b", "--jobs", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + 60
    file = tmp_path / "b" / SEARCH_FILE
    while not file.is_file() or '"average_accuracy": [' not in file.read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)  # with its two jobs
    process.wait()
    assert load_search(file).status == "unfinished"
    while any(is_locked(folder) for folder in (tmp_path / "b").rglob("*") if folder.is_dir()):
        assert time.monotonic() < until
    assert forgetless([*TUNE, "--out", "b"], capsys)[0] == 0
    assert without_seconds(tmp_path / "b") == without_seconds(tmp_path / "a")


def test_compare_takes_the_choices(search, capsys):
    compare = ["compare", "rotated-digits", "--no-analyse", "--json"]
    files = ["--csv", "t/table.csv", "--latex", "t/table.tex", "--out", "b"]
    status, out, _ = forgetless([*compare, "--best", "a", *files, "--seeds", "2"], capsys)
    assert status == 0
    with Path("t/table.csv").open() as table:
        assert [row["method"] for row in csv.DictReader(table)] == ["SGD", "EWC"]
    assert r"\bottomrule" in Path("t/table.tex").read_text()
    assert Path("b/search.json").read_text() == Path("a/search.json").read_text()
    best = load_search("a").best["ewc"].settings
    by_hand = ["--lr", best["lr"], "--ewc-strength", best["ewc_strength"], *QUICK, "--seeds", "2"]
    status, again, _ = forgetless([*compare, "--methods", "ewc", *by_hand], capsys)
    assert status == 0
    sgd, ewc = json.loads(out)
    (expected,) = json.loads(again)
    assert ewc | {"seconds": 0, "out": 0} == expected | {"seconds": 0, "out": 0}
    assert (sgd["method"], sgd["config"]["lr"], sgd["measured_on"]) == ("sgd", 0.1, "test")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["compare", "split-digits", "--best", "a"], "is a search on rotated-digits, not on split"),
        (["compare", "rotated-digits", "--best", "a", "--tasks", "3"], "tasks is 2 there and 3"),
        (["compare", "rotated-digits", "--best", "a", "--model", "lenet"], "model is 'mlp' there"),
        (["compare", "rotated-digits", "--best", "a", "--methods", "ogd"], "no choice for ogd"),
        (
            ["compare", "rotated-digits", "--best", "a", "--seeds", "1"],
            "--seeds must be two or more",
        ),
        (["compare", "rotated-digits", "--best", "a", "--against", "gpm"], "one of sgd, ewc"),
        (["compare", "rotated-digits", "--best", "a", "--test", "u"], "t or permutation, not 'u'"),
        (["compare", "rotated-digits", "--best", "b"], "b cannot be read: No such file"),
        ([*TUNE, "--out", "a", "--seeds", "3"], "seeds is [100, 101] there and [0, 1, 2] here"),
    ],
)
def test_a_file_of_another_search_is_refused(command, words, search, capsys):
    status, out, err = forgetless(command, capsys)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--grid", "lr="], "--grid must be NAME=VALUES with at least one value"),
        (["--grid", "lr"], "--grid must be NAME=VALUES"),
        (["--grid", "lr=fast"], "--grid lr must be a number, not 'fast'"),
        (["--grid", "lr=-1,1"], "the grid of lr must be a positive number, not -1.0"),
        (["--grid", "lr=1", "--grid", "lr=2"], "given once for each option, and lr is"),
        (["--grid", "lrr=1"], "the grid of lrr is of no option that can be searched of sgd, ewc"),
        (["--grid", "ewc:lrr=1"], "unknown option of ewc 'lrr': did you mean 'lr'?"),
        (["--grid", "gpm:lr=1"], "the method in the grid gpm:lr must be one of sgd, ewc"),
        (["--lr", "0.1", "--grid", "lr=1"], "lr has a value and a grid: give one of the two"),
        (["--validation-per-class", "0"], "a search never measures on the test set"),
        (["--validation-per-class", "20"], "less than the 20 training images of a class"),
        (["--sampler", "random"], "--sampler must be grid or tpe"),
        (["--out", "s3://x"], "must be a folder"),
        (["--gpm-threshold", "0.9"], "sgd, ewc do not use --gpm-threshold"),
    ],
)
def test_mistakes_are_one_sentence(options, words, capsys, tmp_path):
    command = ["tune", "rotated-digits", "--methods", "sgd,ewc", *QUICK, *options]
    status, out, err = forgetless(command, capsys)
    assert (status, out) == (2, "")
    assert words in err.splitlines()[-1]
    assert not any(tmp_path.iterdir())


OWN = """
import torch
from forgetless import TensorScenario

def blobs(seed, held_out):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 5, generator=generator)
    return x, (x[:, 0] > 0).long()

def tested(tasks=2):
    return TensorScenario([(blobs(t, 0), blobs(t + 9, 0)) for t in range(tasks)])

def held_out(tasks=2, validation_per_class=0):
    made = tested(tasks)
    if validation_per_class:
        made.measured_on = "validation"
    return made
"""


METHOD = '''
from dataclasses import dataclass
from typing import ClassVar
from forgetless import Method
from forgetless.methods import option

@dataclass(frozen=True)
class Mine(Method[None]):
    """Shorter steps."""

    name: ClassVar[str] = "mine"
    acts_on = "gradient"
    length: float = option(0.5, "The length of a step.", search=(0.5, 1.0))

    def init(self, view):
        return None

    def update(self, g, state, view):
        return self.length * g, state

    def consolidate(self, state, view, task):
        return state
'''


def test_a_method_of_ones_own_declares_what_to_try(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(METHOD)
    command = ["tune", "rotated-digits", "--methods", "mine.py:Mine", "--lr", "0.1", *QUICK]
    status, _, err = forgetless([*command, "--out", "a"], capsys)
    assert (status, err.splitlines()[1]) == (0, "  mine (2): length 0.5, 1")
    choice = load_search("a").best["mine"]
    assert choice.method.length == choice.settings["length"]
    best = ["compare", "rotated-digits", "--best", "a", "--seeds", "2", "--json", "--no-analyse"]
    status, out, _ = forgetless(best, capsys)
    assert status == 0
    assert json.loads(out)[0]["config"]["length"] == choice.settings["length"]
    (tmp_path / "mine.py").write_text(METHOD.replace("self.length * g", "self.length * g / 2"))
    script = f"from forgetless.cli import main; main({[*command, '--out', 'a']!r})"
    edited = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert edited.returncode == 2
    assert "holds another search: mine code is" in edited.stderr


def test_tasks_of_ones_own_must_hold_out_samples(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    quick = ["--methods", "sgd", "--grid", "lr=0.1,0.2", "--epochs", "1", "--out", "a"]
    status, _, err = forgetless(["tune", "mine.py:tested", *quick], capsys)
    assert (status, err.count("\n")) == (2, 1)
    assert "give the function a parameter validation_per_class" in err
    assert forgetless(["tune", "mine.py:held_out", *quick], capsys)[0] == 0
    best = ["compare", "mine.py:held_out", "--best", "a", "--seeds", "2", "--json"]
    status, out, _ = forgetless(best, capsys)
    assert status == 0
    assert json.loads(out)[0]["measured_on"] == "test"


def test_the_error_of_a_run_is_not_hidden_by_the_table(capsys, tmp_path):
    """What is done is shown, without tests; files of a table are of all methods or none."""
    files = ["--csv", "t.csv", "--latex", "t.tex", "--against", "sgd", "--seeds", "2"]
    compare = ["compare", "rotated-digits", "--methods", "sgd,ewc", "--ewc-strength", "1e9"]
    status, out, err = forgetless([*compare, *QUICK, *files], capsys)
    assert status == 1
    assert "smaller strength than 1e+09 may help" in err
    assert "SGD" in out
    assert not list(tmp_path.glob("t.*"))
