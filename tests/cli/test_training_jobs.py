"""`--engine` and `--jobs` on the command line."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from forgetless.paper.results import load_results
from tests.conftest import forgetless
from tests.launch.engines.problems import assert_alike

pytestmark = pytest.mark.usefixtures("elsewhere")
QUICK = ["--tasks", "2", "--epochs", "1", "--train-per-class", "10", "--memory", "5"]
COMPARE = ["compare", "rotated-digits", "--methods", "sgd,ogd", "--seeds", "2", *QUICK]
BUILD = ["paper", "build", "table1", "--scale", "small", "--device", "cpu", "--seeds", "1"]


def test_compare_with_several_jobs_says_the_same(capsys, tmp_path):
    status, expected, err = forgetless([*COMPARE, "--out", "a", "--json"], capsys)
    assert (status, err) == (0, "")
    status, found, err = forgetless([*COMPARE, "--out", "b", "--json", "--jobs", "2"], capsys)
    assert status == 0
    for method in ("sgd", "ogd"):
        assert_alike(tmp_path / "b" / method, tmp_path / "a" / method)
    for one, other in zip(json.loads(found), json.loads(expected), strict=True):
        assert one | {"seconds": 0, "out": 0} == other | {"seconds": 0, "out": 0}
    names = {f.name for f in (tmp_path / "a").iterdir()}
    assert {f.name for f in (tmp_path / "b").iterdir()} == names
    lines = err.splitlines()
    assert len(lines) == 8
    assert lines[0] == "rotated-digits sgd seed 0 begins on worker 1"
    assert "; 4 of 4 jobs done, " in lines[-1]
    # Once more: it is complete, and with --resume shown without training.
    assert forgetless([*COMPARE, "--out", "b", "--jobs", "2"], capsys)[0] == 2
    status, again, err = forgetless(
        [*COMPARE, "--out", "b", "--jobs", "2", "--resume", "--json"], capsys
    )
    assert (status, again, err) == (0, found, "")


def test_a_build_with_several_jobs_has_the_same_numbers(capsys, tmp_path):
    folders = [["--runs", f"{n}/runs", "--results", n, "--page", f"{n}/p.md"] for n in "ab"]
    assert forgetless([*BUILD, *folders[0]], capsys)[0] == 0
    status, out, err = forgetless([*BUILD, *folders[1], "--jobs", "2"], capsys)
    assert status == 0
    assert "Built in " in out
    assert "2 jobs at a time" in out
    one, other = (load_results(tmp_path / n, ["table1"])["table1"] for n in "ab")
    assert _without_seconds(one["data"]) == _without_seconds(other["data"])
    of = other["provenance"]
    assert of["jobs"] == 2
    assert of["seconds wall"] >= of["seconds measuring"] > 0
    runs = sorted(f.name for f in (tmp_path / "a" / "runs").iterdir())
    assert sorted(f.name for f in (tmp_path / "b" / "runs").iterdir()) == runs
    for run in runs:
        assert_alike(tmp_path / "b/runs" / run, tmp_path / "a/runs" / run)
    assert f"{len(runs)} of {len(runs)} jobs done" in err
    assert "table1: measuring" in err


def _without_seconds(value):
    if isinstance(value, dict):
        return {k: _without_seconds(v) for k, v in value.items() if k != "seconds"}
    return value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--jobs", "0"], "--jobs must be a number of jobs at a time, at least 1, not 0"),
        (["--jobs", "many"], "Invalid value for '--jobs'"),
        (["--engine", "slurm"], "--engine must be local or ray, not 'slurm'"),
        (["--address", "10.0.0.1:6379"], "--address 10.0.0.1:6379 is only for Ray"),
    ],
)
@pytest.mark.parametrize("command", [COMPARE, BUILD], ids=["compare", "build"])
def test_mistakes_are_one_sentence(command, options, words, capsys, tmp_path):
    status, out, err = forgetless([*command, *options], capsys)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_saves_all_jobs(number, capsys, tmp_path):
    longer = [*COMPARE, "--out", "a", "--jobs", "2", "--epochs", "200", "--tasks", "5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "forgetless", *longer], stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while not list(tmp_path.glob("a/*/jobs/*/trace.json")):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err.splitlines()[-1].endswith("the same command resumes from what was saved")
    assert "Traceback" not in err
    assert list(tmp_path.glob("a/*/jobs/*/checkpoint/manifest-*"))
    assert not list(tmp_path.rglob(".lock"))
