"""`forgetless run` and `compare`, in a process of their own where that matters."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from forgetless import load_trace
from tests.conftest import forgetless

pytestmark = pytest.mark.usefixtures("elsewhere")
QUICK = ["--tasks", "2", "--epochs", "1", "--train-per-class", "10"]
RUN = ["run", "rotated-digits", "--method", "pca-ogd", *QUICK, "--memory", "5", "--samples", "20"]


def test_run_shows_a_table_and_leaves_a_trace_and_a_picture(capsys, tmp_path):
    status, out, err = forgetless(RUN, capsys)
    assert status == 0
    assert err == ""
    for word in ("0°", "15°", "when learned", "A_T", "F_T", "Results are in"):
        assert word in out
    folder = tmp_path / "runs" / "rotated-digits-pca-ogd"
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert load_trace(folder).config["memory"] == 5
    forgetless(RUN, capsys)
    assert (tmp_path / "runs" / "rotated-digits-pca-ogd-2" / "trace.json").is_file()


def test_json_is_one_object_with_the_promised_fields(capsys):
    status, out, _ = forgetless([*RUN, "--seeds", "3,7", "--json", "--out", "here"], capsys)
    assert status == 0
    result = json.loads(out)
    assert set(result) == {
        "scenario", "method", "seeds", "average_accuracy", "forgetting", "accuracy", "seconds",
        "config", "outcome", "out", "measured_on",
    }  # fmt: skip
    assert (result["scenario"], result["method"], result["out"]) == (
        "rotated-digits",
        "pca-ogd",
        "here",
    )
    assert result["seeds"] == [3, 7]
    accuracy = result["accuracy"]
    assert np.shape(accuracy) == (2, 2, 2)
    assert accuracy[0][0][1] is None
    final = [np.mean(matrix[1]) for matrix in accuracy]
    assert result["average_accuracy"]["per_seed"] == pytest.approx(final)
    assert result["average_accuracy"]["mean"] == pytest.approx(np.mean(final))
    assert result["average_accuracy"]["std"] == pytest.approx(np.std(final))
    drop = [max(m[0][0], m[1][0]) - m[1][0] for m in accuracy]
    assert result["forgetting"]["per_seed"] == pytest.approx(drop)
    assert result["config"]["samples"] == 20
    assert result["seconds"] > 0


def test_compare_puts_methods_side_by_side(capsys, tmp_path):
    arguments = ["compare", "rotated-digits", "--methods", "sgd, ogd", *QUICK, "--memory", "5"]
    status, out, _ = forgetless([*arguments, "--out", "both"], capsys)
    assert status == 0
    assert "SGD" in out
    assert "OGD" in out
    assert (tmp_path / "both" / "accuracy.png").is_file()
    status, out, _ = forgetless([*arguments, "--out", "json", "--json"], capsys)
    results = json.loads(out)
    assert [r["method"] for r in results] == ["sgd", "ogd"]
    written = json.loads((tmp_path / "json" / "comparison.json").read_text())
    assert written == results
    assert load_trace(tmp_path / "json" / "ogd").method == "ogd"
    files = [{f.name for f in (tmp_path / name / "ogd").iterdir()} for name in ("both", "json")]
    assert files[0] == files[1]
    assert "analysis.json" in files[0]


def test_an_existing_run_is_not_overwritten_unless_asked(capsys, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    status, _, err = forgetless([*RUN, "--out", "mine", "--overwrite"], capsys)
    assert status == 2
    assert "not a run's" in err
    assert (tmp_path / "mine" / "diary.txt").read_text() == "dear diary"
    assert forgetless([*RUN, "--out", "a"], capsys)[0] == 0
    before = (tmp_path / "a" / "trace.json").stat().st_mtime_ns
    status, _, err = forgetless([*RUN, "--out", "a"], capsys)
    assert (status, (tmp_path / "a" / "trace.json").stat().st_mtime_ns) == (2, before)
    assert "--overwrite" in err
    assert forgetless([*RUN, "--out", "a", "--overwrite"], capsys)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "rotated-dogs", "--method", "sgd"], "unknown scenario 'rotated-dogs'"),
        (["run", "rotated-digits"], "Missing option '--method'"),
        (["run", "rotated-digits", "--method", "adam"], "unknown method 'adam'"),
        (
            ["run", "rotated-digits", "--method", "sgd", "--sepoch", "3"],
            "unknown option '--sepoch': did you mean '--epochs'?",
        ),
        (["run", "rotated-digits", "--method", "sgd", "--epochs", "many"], "'--epochs'"),
        (
            ["run", "rotated-digits", "--method", "sgd", "--epochs", "0"],
            "--epochs must be a whole number of at least 1, not 0",
        ),
        (
            ["run", "rotated-digits", "--method", "sgd", "--lr", "nan"],
            "--lr must be a positive number, not nan",
        ),
        (
            ["run", "rotated-digits", "--method", "sgd", "--tasks", "0"],
            "--tasks must be a whole number of at least 1, not 0",
        ),
        (
            ["run", "rotated-digits", "--method", "ogd", "--memory", "0"],
            "--memory must be a whole number of at least 1, not 0",
        ),
        (
            ["run", "rotated-digits", "--method", "pca-ogd", "--variance", "1.5"],
            "--variance must be a share in (0, 1), not 1.5",
        ),
        (["run", "rotated-digits", "--method", "sgd", "--memory", "5"], "sgd does not use --mem"),
        (
            ["run", "rotated-digits", "--method", "a-gem", "--budget", "auto"],
            "a-gem does not use --budget",
        ),
        (
            ["run", "rotated-digits", "--method", "pca-ogd", "--memory", "5", "--variance", "0.9"],
            "pca-ogd does not use --memory with --variance",
        ),
        (
            ["run", "rotated-digits", "--method", "gem", "--storage", "factored"],
            "gem does not use --storage",
        ),
        (
            ["run", "split-digits", "--method", "sgd", "--step-degrees", "9"],
            "split-digits does not use --step-degrees",
        ),
        (
            ["compare", "permuted-digits", "--classes-per-task", "5"],
            "permuted-digits does not use --classes-per-task",
        ),
        (
            ["compare", "rotated-digits", "--methods", "sgd,ewc", "--memory", "5"],
            "sgd, ewc do not use --memory",
        ),
        (["run", "rotated-digits", "--method", "sgd", "--model", "gpt"], "unknown model 'gpt'"),
        (["run", "rotated-digits", "--method", "sgd", "--seeds", "none"], "--seeds must be"),
        (["run", "rotated-digits", "--method", "sgd", "--device", "abacus"], "cannot be used"),
        (["run", "rotated-digits", "--method", "sgd", "--keep", "it"], "--keep must be"),
        (["run", "rotated-digits", "--method", "sgd", "--data", "nowhere"], "nowhere"),
        (["run", "rotated-mnist", "--method", "sgd", "--data", "empty"], "mnist"),
        (["compare", "rotated-digits", "--methods", "sgd,sgd"], "--methods must be"),
        (["compare", "rotated-digits", "--methods", ","], "--methods must be"),
        (["compare", "rotated-digits", "--methods", "sgd,adam"], "unknown method 'adam'"),
        (["data", "fetch", "dogs"], "dogs"),
        (["dance"], "unknown command 'dance'"),
        (
            ["run", "rotated-digits", "--method", "sgd", "--out", "file/inside"],
            "cannot be made: Not a directory",
        ),
        (["run", "rotated-digits", "--method", "sgd", "--out", "file"], "it is a file"),
        (["run", "rotated-digits", "--method", "sgd", "--step-degrees", "nan"], "a finite number"),
        (["run", "rotated-digits", "--method", "gem", "--gem-margin", "inf"], "a finite number"),
        (["run", "rotated-digits", "--method", "sgd", "--lr", "1e300"], "lr must be a positive"),
        (
            ["run", "rotated-digits", "--method", "sgd", "--hidden", "1000000000000"],
            "cannot be made",
        ),
        (["run", "rotated-digits", "--method", "sgd", "--seeds", "9" * 30], "--seeds must be"),
        (["run", "rotated-digits", "--method", "sgd", "--seeds", "1000000"], "--seeds must be"),
        (
            ["run", "rotated-digits", "--method", "sgd", "--model", "lenet", "--batch-size", "1"],
            "cannot train on 1 at a time",
        ),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(arguments, sentence, capsys, tmp_path, monkeypatch):
    (tmp_path / "empty" / "mnist").mkdir(parents=True)
    (tmp_path / "empty" / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"truncated")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    status, out, err = forgetless(arguments, capsys)
    assert status == 2
    assert out == ""
    assert err.startswith("forgetless: ")
    assert sentence in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "mistake",
    [["--hidden", "0"], ["--model", "gpt"], ["--device", "abacus"], ["--freeze", "zzz"],
     ["--tasks", "0"], ["--data", "nowhere"], ["--train-per-class", "99999"]],
)  # fmt: skip
def test_overwriting_waits_until_the_settings_are_known_to_be_good(mistake, capsys, tmp_path):
    assert forgetless([*RUN, "--out", "a"], capsys)[0] == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert forgetless([*RUN, "--out", "a", "--overwrite", *mistake], capsys)[0] == 2
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_overwriting_leaves_other_files_alone(capsys, tmp_path):
    assert forgetless([*RUN, "--out", "a"], capsys)[0] == 0
    (tmp_path / "a" / "notes.txt").write_text("mine")
    assert forgetless([*RUN, "--out", "a", "--overwrite"], capsys)[0] == 0
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


def test_odd_names_are_shown_as_they_are(capsys):
    status, out, _ = forgetless([*RUN, "--out", "x[/]y[lr]"], capsys)
    assert status == 0
    assert "x[/]y[lr]" in out


def test_two_runs_that_start_together_get_two_folders(tmp_path):
    command = [sys.executable, "-m", "forgetless", *RUN, "--json"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    results = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    assert len({result["out"] for result in results}) == 2


def test_diverged_training_is_status_1(capsys, tmp_path):
    status, _, err = forgetless([*RUN, "--lr", "1e30"], capsys)
    assert status == 1
    assert "NaN or infinite by step" in err
    assert not list(tmp_path.iterdir())


def test_a_method_that_diverges_does_not_keep_the_others_from_training(capsys, tmp_path):
    command = ["compare", "rotated-digits", "--methods", "ewc,sgd", "--tasks", "2", "--epochs", "2"]
    command += ["--train-per-class", "20", "--ewc-strength", "1e9", "--no-analyse"]
    status, out, err = forgetless([*command, "--out", str(tmp_path / "out")], capsys)
    assert status == 1
    assert "SGD" in out
    assert "rotated-digits ewc: the weights are NaN or infinite" in err


def test_help_shows_every_setting_with_its_default(capsys):
    _, out, _ = forgetless(["run", "--help"], capsys)
    for option in (
        "--tasks", "--step-degrees", "--train-per-class", "--epochs", "--batch-size", "--lr",
        "--memory", "--samples", "--seeds", "--data", "--out", "--device", "--json",
    ):  # fmt: skip
        assert f"{option} " in out or f"{option}\n" in out, option
    text = " ".join(out.split())
    assert "[default: 10, 5 for split-*mnist, 50 for *-cifar100]" in text


def test_ctrl_c_stops_cleanly_and_keeps_what_was_finished(tmp_path):
    command = [sys.executable, "-m", "forgetless", "run", "rotated-digits", "--method", "sgd"]
    command += ["--tasks", "40", "--epochs", "5", "--json", "--out", "stopped"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    record = tmp_path / "stopped" / "trace.json"
    deadline = time.monotonic() + 60
    while not record.is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert "interrupted" in err
    trace = load_trace(tmp_path / "stopped")
    assert trace.status == "interrupted"
    learned = int(np.isfinite(np.diagonal(trace.accuracy[0])).sum())
    assert 0 < learned < 40
    assert trace.weights(0, learned - 1)


@pytest.mark.usefixtures("elsewhere")
def test_names_of_parameters_are_checked_before_anything_is_trained(capsys, tmp_path):
    quick = ["--tasks", "2", "--epochs", "1", "--train-per-class", "10", "--out", "a"]
    compare = ["compare", "split-digits", "--methods", "sgd,a-gem", *quick]
    for options, sentence in (
        (["--unprotected", "nowhere"], "unprotected must be the beginning of a parameter's name"),
        (["--freeze", "body"], "no trainable parameters that are to be protected"),
        (["--unprotected", "body.1", "--protocol", "released"], "nothing can be left unprotected"),
    ):
        status, _, err = forgetless([*compare, *options], capsys)
        assert (status, err.count("\n")) == (2, 1)
        assert sentence in err
        assert not list(tmp_path.iterdir())
    run = ["run", "rotated-digits", "--method", "sgd", "--unprotected", "body.1", *quick]
    status, _, err = forgetless(run, capsys)
    assert (status, err) == (2, "forgetless: sgd does not use --unprotected\n")
