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
from forgetless.paper.artefacts import (
    kernel_change,
    memory_sweep,
    methods_summary,
    same_bytes,
    table1,
)
from forgetless.paper.build import Plan, build
from forgetless.paper.claims import ALL
from forgetless.paper.claims.base import judged
from forgetless.paper.page import make_page
from forgetless.paper.printed import Cell
from forgetless.paper.scale import SMALL
from forgetless.paper.store import is_among, load_results, overlaid, rounded, save_result
from forgetless.paper.work import Workshop
from forgetless.support.errors import TraceError
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
            assert run["config"]["seeds"]
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
    sweep = memory_sweep.sweep_run(SMALL, "rotated", "pca-ogd", SMALL.memory)
    assert sweep.key == table1.cell_run(SMALL, "rotated", "pca-ogd").key
    folders = {folder.name for folder in (built / "runs/paper").iterdir()}
    used = {key for record in records(built).values() for key in record["provenance"]["runs"]}
    assert folders == used


def test_building_again_trains_nothing(built, monkeypatch, capfd):
    monkeypatch.chdir(built)
    monkeypatch.setattr("forgetless.paper.work.train", None)  # calling it would fail
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


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (a.name, part)
        for a in ARTEFACTS.values()
        for part in list(a.parts(SMALL, {}))[:: len(a.parts(SMALL, {})) // 5 or 1]
        if part  # else it is all or nothing
    ],
)
def test_a_part_whose_runs_are_there_is_measured_without_the_others(
    built, tmp_path, monkeypatch, name, part
):
    monkeypatch.chdir(tmp_path)
    artefact, whole = ARTEFACTS[name], records(built)[name]
    others = {other: records(built)[other] for other in artefact.needs}
    for run in artefact.parts(SMALL, others)[part]:
        # As it is brought back from another machine: the trace and what was found in the weights.
        shutil.copytree(
            built / "runs/paper" / run.key,
            tmp_path / "runs/paper" / run.key,
            ignore=shutil.ignore_patterns("seed-*"),
            dirs_exist_ok=True,
        )
    for other, record in others.items():
        save_result(tmp_path / "runs/paper-small/results", other, record)
    arguments = ("--scale", "small", "--device", "cpu", "--no-train")
    assert forgetless("paper", "build", name, *arguments) == 0
    record = records(tmp_path)[name]
    assert part in set(artefact.parts(SMALL, {})) - set(record["lacks"])
    assert set(record["data"]).isdisjoint(record["lacks"])
    assert overlaid(whole["data"], record["data"]) == whole["data"]
    # The page says what is missing, and what needs it is not decided.
    page, _ = make_page({name: record}, "images")
    assert f"(`forgetless paper build {name} --scale small`)" in page
    for claim in (claim for claims in ALL.values() for claim in claims):
        names = {need.partition(": ")[0] for need in claim.needs}
        if name in names:
            others = {n: of for n, of in records(built).items() if n != name}
            word, _, why = judged(claim, {**others, name: record})
            assert word in VERDICTS
            needed = next(n for n in claim.needs if n.startswith(name)).partition(": ")[2]
            if not needed or any(is_among(p, needed.split(", ")) for p in record["lacks"]):
                assert why.startswith(f"not measured yet: {name} on ")
            else:
                assert (word, why) == judged(claim, records(built))[::2]


def test_of_the_same_bytes_every_row_stands_alone(built, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(built / "runs/paper-small/results", "runs/paper-small/results")
    runs = same_bytes.parts(SMALL, records(built))
    assert len(runs) == len(records(built)["same-bytes"]["data"]["methods"])
    Path("runs/paper-small/results/same-bytes.json").unlink()
    for part in ("rotated SGD", f"rotated OGD, {SMALL.memory} samples"):
        Path("runs/paper", runs[part][0].key).mkdir(parents=True)
        file = Path("runs/paper", runs[part][0].key, "trace.json")
        shutil.copy(built / file, file)
        results = Path("runs/paper-small/results")
        plan = Plan(SMALL, Path("runs/paper"), results, device="cpu", train=False)
        build([ARTEFACTS["same-bytes"]], plan, lambda stage: None)
        record = records(tmp_path)["same-bytes"]
        assert part not in record["lacks"]
        assert part.removeprefix("rotated ") in record["data"]["methods"]
    page, _ = make_page({"same-bytes": record}, "images")
    assert re.search(
        r"Best under 640 MB: .*; within \d+ MB: .*; of those that keep no image, OGD, 8 samples, ",
        page,
    )
    assert "still win when OGD stores factored samples?** Not measured yet: same-bytes on" in page


def test_what_was_measured_is_not_lost_with_the_runs(built, tmp_path):
    """Traces go when a disk is cleared; the numbers that came of them stay."""
    results, runs = tmp_path / "results", tmp_path / "runs"
    results.mkdir()
    plan = Plan(SMALL, runs, results, device="cpu", train=False)
    cells = memory_sweep.parts(SMALL, {})
    for part in ("rotated/ogd/4", "rotated/pca-ogd/8", "cifar/ogd/4"):
        (run,) = cells[part]
        shutil.rmtree(runs, ignore_errors=True)
        shutil.copytree(built / "runs/paper" / run.key, runs / run.key)
        build([ARTEFACTS["memory"]], plan, lambda stage: None)
    record = load_results(results, ["memory"])["memory"]
    data = record["data"]
    assert {b: {m: list(of) for m, of in ms.items()} for b, ms in data.items()} == {
        "rotated": {"ogd": ["4"], "pca-ogd": ["8"]}, "cifar": {"ogd": ["4"]},
    }  # fmt: skip
    whole = records(built)["memory"]
    assert overlaid(whole["data"], data) == whole["data"]
    known = record["provenance"]["runs"]
    assert known == {key: of for key, of in whole["provenance"]["runs"].items() if key in known}
    assert record["provenance"]["seconds training"] == pytest.approx(
        sum(of["seconds"] for of in known.values()), rel=1e-4
    )
    assert len(record["lacks"]) == len(cells) - 3
    assert "| Rotated, OGD | " in make_page({"memory": record}, "images")[0]


def test_runs_of_parts_that_are_not_kept_are_not_carried_over(built, tmp_path):
    results, runs = tmp_path / "results", tmp_path / "runs"
    whole = records(built)["memory"]
    stale = {"gone": whole["provenance"]["runs"][min(whole["provenance"]["runs"])]}
    provenance = whole["provenance"] | {"runs": whole["provenance"]["runs"] | stale}
    save_result(results, "memory", whole | {"provenance": provenance})
    (run,) = memory_sweep.parts(SMALL, {})["rotated/ogd/4"]
    shutil.copytree(built / "runs/paper" / run.key, runs / run.key)
    plan = Plan(SMALL, runs, results, device="cpu", train=False)
    build([ARTEFACTS["memory"]], plan, lambda stage: None)
    record = load_results(results, ["memory"])["memory"]
    assert record["data"] == whole["data"]
    assert record["provenance"]["runs"] == whole["provenance"]["runs"]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("memory", ["{results}/memory.json"]),
        ("kernel-change", ["{results}/kernel-change.json", "kernel-change.json in the folders of"]),
    ],
)
def test_a_part_that_was_kept_and_cannot_be_shown_is_to_be_deleted(built, tmp_path, name, files):
    results, runs = tmp_path / "results", tmp_path / "runs"
    whole = records(built)[name]
    save_result(results, name, whole | {"data": whole["data"] | {"cifar": "nonsense"}})
    for part in ARTEFACTS[name].parts(SMALL, {}):
        if part.startswith("rotated"):
            for run in ARTEFACTS[name].parts(SMALL, {})[part]:
                shutil.copytree(built / "runs/paper" / run.key, runs / run.key, dirs_exist_ok=True)
    plan = Plan(SMALL, runs, results, device="cpu", train=False)
    with pytest.raises(TraceError, match="is damaged") as error:
        build([ARTEFACTS[name]], plan, lambda stage: None)
    advice = " and ".join(files).format(results=results)
    assert f"; delete {advice}" in str(error.value)


def test_what_was_just_measured_and_cannot_be_shown_is_of_damaged_runs(built, tmp_path):
    def show(data, pictures):
        raise KeyError("average")

    plan = Plan(SMALL, built / "runs/paper", tmp_path, device="cpu", train=False)
    with pytest.raises(TraceError, match=r"table1 is damaged .*; delete the folders of its runs$"):
        build([replace(table1.ARTEFACT, show=show)], plan, lambda stage: None)


def test_what_was_measured_with_other_settings_is_neither_kept_nor_overwritten(built, tmp_path):
    results = tmp_path / "results"
    shutil.copytree(built / "runs/paper-small/results", results)
    before = (results / "memory.json").read_text("utf-8")
    others = replace(SMALL, memories=(4, 8, 12))
    (run,) = memory_sweep.parts(others, {})["rotated/ogd/4"]
    shutil.copytree(built / "runs/paper" / run.key, tmp_path / "runs" / run.key)
    plan = Plan(others, tmp_path / "runs", results, device="cpu", train=False)
    with pytest.raises(TraceError, match=r"on other runs that are gone \(rotated/ogd/12, .*delete"):
        build([ARTEFACTS["memory"]], plan, lambda stage: None)
    assert (results / "memory.json").read_text("utf-8") == before


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


@pytest.mark.parametrize(
    ("average", "agrees"), [([80.0, 80.0], True), ([81.4, 81.4], True), ([81.6, 81.6], False)]
)
def test_a_cell_agrees_within_the_allowance(average, agrees):
    assert table1.agreement(Cell(80.0, 0.1, 1.0, 0.1), {"average": average})[0] is agrees


def test_the_spread_of_both_widens_the_allowance():
    good, difference, allowed = table1.agreement(Cell(80.0, 3.0, 1, 1), {"average": [85.0, 93.0]})
    assert (good, difference) == (True, 9.0)
    assert allowed == pytest.approx(10.0)


@pytest.mark.parametrize("small", [0, 24])
def test_as_many_samples_as_fit_and_no_more(small):
    def needed(n):
        return 100.0 * n * 3 + small * (n * 3) ** 2

    most = same_bytes.samples_that_fit(10_000_000, 100.0, 3, small)
    assert needed(most) <= 10_000_000 < needed(most + 2)


def test_results_are_rounded_and_have_no_nan():
    value = {"a": np.array([1 / 3, np.nan]), 2: (1, 1e-9 / 3)}
    assert rounded(value) == {"a": [0.333333, None], "2": [1, 3.33333e-10]}


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
    key = kernel_change.parts(SMALL, {})["rotated"][0].key
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
