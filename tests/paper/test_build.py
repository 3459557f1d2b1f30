"""The whole of `forgetless paper` at small scale, and the committed page."""

import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

from forgetless.cli import main
from forgetless.paper import ARTEFACTS
from forgetless.paper.artefacts import memory, methods_summary, table1
from forgetless.paper.benchmarks import SMALL
from forgetless.paper.build import Plan, build
from forgetless.paper.claims import ALL
from forgetless.paper.claims.base import judged
from forgetless.paper.page import make_page
from forgetless.paper.results import load_results
from forgetless.paper.workshop import Workshop
from forgetless.support.validation import TraceError
from forgetless.trace import load_trace

ROOT = Path(__file__).parents[2]
VERDICTS = {
    "holds",
    "holds only under the released protocol",
    "does not hold",
    "cannot be decided",
}


def forgetless(*arguments):
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return left.value.code


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Everything at small scale, in a folder of its own; built once for all test processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "paper-small"
    done = folder / "exit status"
    try:
        folder.mkdir()  # whoever makes it builds, the others wait
    except FileExistsError:
        while not done.is_file():
            time.sleep(0.5)
    else:
        status = None
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                status = forgetless("paper", "build", "all", "--scale", "small", "--device", "cpu")
        finally:
            done.write_text(str(status))
    assert done.read_text() == "0"
    return folder


def records(folder):
    return load_results(folder / "runs/paper-small/results", list(ARTEFACTS))


def test_every_artefact_is_built_with_where_it_comes_from(built):
    found = records(built)
    assert list(found) == list(ARTEFACTS)
    for name, record in found.items():
        of = record["provenance"]
        assert record["scale"] == "small"
        assert {"forgetless", "code", "device", "torch", "seconds measuring"} <= of.keys()
        for run in of["runs"].values():
            assert run["seconds"] > 0
            assert run["seeds"]
        hashes = [h for files in of["data"].values() for h in files.values()]
        assert bool(hashes) == bool(of["runs"]), name
        assert all(re.fullmatch("[0-9a-f]{64}", h) for h in hashes)


def test_the_page_says_small_and_judges_every_claim(built):
    text = (built / "runs/paper-small/paper.md").read_text("utf-8")
    assert text.startswith("# The paper, reproduced and judged (small)")
    assert "Not measured yet" not in text
    claims = [claim for group in ALL.values() for claim in group]
    rows = re.findall(r"^\| \d+ \| .*$", text, re.MULTILINE)
    assert len(rows) == len(claims) >= 45
    assert all(any(f"**{word}**" in row for word in VERDICTS) for row in rows)
    for image in re.findall(r"\]\((images/\S+)\)", text):
        assert (built / "runs/paper-small" / image).stat().st_size > 1000
    assert not (built / "docs").exists()
    assert not (built / "results").exists()


def test_what_was_measured_is_what_the_runs_have(built):
    data = records(built)["table1"]["data"]
    run = table1.cell_run(SMALL, "rotated", "pca-ogd")
    trace = load_trace(built / "runs/paper" / run.key)
    final = np.array(data["rotated"]["pca-ogd"]["final"])
    np.testing.assert_allclose(final, trace.accuracy[:, -1], rtol=1e-5)
    assert data["rotated"]["pca-ogd"]["average"] == pytest.approx(list(final.mean(1)), rel=1e-5)


def test_runs_are_shared_between_artefacts(built):
    sweep = memory.sweep_run(SMALL, "rotated", "pca-ogd", SMALL.memory)
    assert sweep.key == table1.cell_run(SMALL, "rotated", "pca-ogd").key
    folders = {folder.name for folder in (built / "runs/paper").iterdir()}
    used = {key for record in records(built).values() for key in record["provenance"]["runs"]}
    assert folders == used


def test_building_again_trains_nothing(built, monkeypatch, capfd):
    monkeypatch.chdir(built)
    monkeypatch.setattr("forgetless.paper.workshop.train", None)  # calling it would fail
    assert forgetless("paper", "build", "table1", "per-task", "--scale", "small") == 0
    assert "runs)" not in capfd.readouterr().err


def test_an_interrupted_build_goes_on_where_it_was(built, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(built / "runs/paper", tmp_path / "runs/paper")
    key = table1.cell_run(SMALL, "split", "sgd").key
    shutil.rmtree(tmp_path / "runs/paper" / key)
    assert forgetless("paper", "build", "table1", "--scale", "small", "--device", "cpu") == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "runs)" in line]
    assert lines == ["table1: split-digits sgd (1 of 1 runs)"]


def test_without_training_cells_that_are_missing_are_left_out(built, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for run in (table1.cell_run(SMALL, "rotated", m) for m in ("sgd", "ogd")):
        # As it is brought back from another machine: without weights.
        (tmp_path / "runs/paper" / run.key).mkdir(parents=True)
        file = Path("runs/paper", run.key, "trace.json")
        shutil.copy(built / file, tmp_path / file)
    arguments = ("--scale", "small", "--device", "cpu", "--no-train")
    assert forgetless("paper", "build", "table1", "per-task", "forgetting-gap", *arguments) == 0
    data = records(tmp_path)["table1"]["data"]
    assert {b: list(of) for b, of in data.items()} == {"rotated": ["sgd", "ogd"]}
    assert data["rotated"]["ogd"] == records(built)["table1"]["data"]["rotated"]["ogd"]
    assert len(records(tmp_path)["table1"]["lacks"]) == 18
    capfd.readouterr()
    assert forgetless("paper", "build", "gem", *arguments) == 2
    assert "gem needs 4 runs" in capfd.readouterr().err
    # Of several, those that can be measured are.
    assert forgetless("paper", "build", "gem", "same-bytes", "per-task", *arguments) == 0
    lines = capfd.readouterr().err
    assert "gem: left out" in lines
    assert "same-bytes: left out; same-bytes needs methods, which has not been measured" in lines
    assert "per-task" in records(tmp_path)
    # A result is not replaced by one that has fewer cells.
    shutil.rmtree(tmp_path / "runs/paper" / table1.cell_run(SMALL, "rotated", "ogd").key)
    before = records(tmp_path)["table1"]
    assert forgetless("paper", "build", "table1", *arguments) == 2
    assert "measured on runs that are gone (rotated/ogd); delete" in capfd.readouterr().err
    assert records(tmp_path)["table1"] == before
    page, _ = make_page({"table1": before}, "images")
    assert "Not measured yet: permuted/sgd, " in page
    assert "(`forgetless paper build table1 --scale small`)" in page


def test_what_was_just_measured_and_cannot_be_shown_is_of_damaged_runs(built, tmp_path):
    def show(data, pictures):
        raise KeyError("average")

    plan = Plan(SMALL, built / "runs/paper", tmp_path, device="cpu", train=False)
    with pytest.raises(TraceError, match=r"table1 is damaged .*; delete the folders of its runs$"):
        build([replace(table1.TABLE1, show=show)], plan, lambda stage: None)


def test_twice_the_rows_in_bfloat16_are_said_to_take_what_they_take(built):
    scale = replace(SMALL, memory=2 * SMALL.memory)
    workshop = Workshop(scale, built / "runs/paper", None, "cpu", {})
    data = records(built)["same-bytes"]["data"]
    for method, what in (("ogd", "OGD, 16 samples"), ("pca-ogd", "PCA-OGD, 16 directions")):
        kept = methods_summary.kept_bytes(workshop, "rotated", method, "bfloat16")
        assert data["methods"][f"{what} in bfloat16"]["bytes"] == kept > data["budget"]


def test_without_results_nothing_that_needs_them_is_decided():
    for claim in (claim for claims in ALL.values() for claim in claims if claim.needs):
        word, _, why = judged(claim, {})
        assert word == "cannot be decided"
        assert why.startswith("not measured yet")


def test_the_committed_page_is_what_the_committed_results_give():
    found = load_results(ROOT / "results/paper", list(ARTEFACTS))
    assert all(record["scale"] == "full" for record in found.values())
    text, pictures = make_page(found, "images/paper")
    assert (ROOT / "docs/paper.md").read_text("utf-8") == text
    folder = ROOT / "docs/images/paper"
    assert {file.name for file in folder.glob("*.svg")} == set(pictures.files)
    for name, drawn in pictures.files.items():
        committed = (folder / name).read_bytes()
        # Another version of Matplotlib draws the same a little differently.
        if f"Matplotlib v{mpl.__version__}".encode() in committed:
            assert committed == drawn, name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build", "table9"], "unknown artefact 'table9'"),
        (["build", "table1", "--scale", "huge"], "--scale must be full or small"),
        (["build", "table1", "--seeds", "none"], "--seeds must be"),
    ],
)
def test_mistakes_are_one_sentence(arguments, words, capfd):
    assert forgetless("paper", *arguments) == 2
    error = capfd.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"lacks": "rotated"},
        {"lacks": [1]},
        {"data": 5},
        {"data": {}},
        {"data": {"rotated": 3}},
        {"provenance": {}},
        {"provenance": None},
        {"scale": [1]},
    ],
)
def test_a_damaged_result_is_named_in_one_sentence(built, tmp_path, capfd, change):
    folder = shutil.copytree(built / "runs/paper-small/results", tmp_path / "results")
    file = folder / "memory.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    where = ("--results", str(folder), "--page", str(tmp_path / "page.md"))
    assert forgetless("paper", "page", "--scale", "small", *where) == 2
    text = capfd.readouterr().err
    assert "memory" in text
    assert "again" in text
    assert "Traceback" not in text


def test_without_any_result_there_is_no_page(tmp_path, capfd):
    page = tmp_path / "page.md"
    nowhere = ("--results", str(tmp_path / "nowhere"), "--page", str(page))
    assert forgetless("paper", "page", *nowhere) == 2
    assert "there are no results in" in capfd.readouterr().err
    assert not page.exists()


def test_what_was_found_and_cannot_be_shown_is_not_kept(built, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(built / "runs/paper", "runs/paper")
    key = table1.cell_run(SMALL, "rotated", "pca-ogd").key
    file = Path("runs/paper", key, "kernel-change.json")
    kept = json.loads(file.read_text())
    kept["content"]["found"] = "nonsense"
    file.write_text(json.dumps(kept))
    arguments = ("--scale", "small", "--device", "cpu")
    assert forgetless("paper", "build", "kernel-change", *arguments) == 2
    assert "delete kernel-change.json in the folders of its runs" in capfd.readouterr().err
    assert "kernel-change" not in records(tmp_path)
    kept["content"]["seconds"] = "x"  # which is seen: it is found again
    file.write_text(json.dumps(kept))
    assert forgetless("paper", "build", "kernel-change", *arguments) == 0
    assert records(tmp_path)["kernel-change"]["data"] == records(built)["kernel-change"]["data"]


def test_a_file_that_is_no_result_is_refused(tmp_path, capfd):
    (tmp_path / "table1.json").write_text(json.dumps({"format": 99}))
    assert forgetless("paper", "page", "--results", str(tmp_path), "--page", "p.md") == 2
    assert "table1.json" in capfd.readouterr().err


def test_the_list_has_every_artefact(capfd):
    assert forgetless("paper", "list") == 0
    shown = capfd.readouterr().out
    assert all(name in shown for name in ARTEFACTS)
