"""Where training diverged it is said so: it is no number, and no reason to believe the paper."""

from dataclasses import replace

import pytest

from forgetless.paper import ARTEFACTS
from forgetless.paper.answers import answers
from forgetless.paper.artefacts import memory, same_bytes, table1
from forgetless.paper.benchmarks import SMALL, Run
from forgetless.paper.claims import ALL
from forgetless.paper.claims.base import FAILS, HOLDS, UNDECIDED, judged
from forgetless.paper.numbers import DIVERGED, cell
from forgetless.paper.page import make_page
from forgetless.paper.pictures import Pictures
from forgetless.paper.printed import TABLE1
from forgetless.paper.results import rounded
from forgetless.paper.workshop import Workshop

BROKEN = {DIVERGED: True}


def verdict(words, **data):
    """Verdict and measurement of the one claim that says these words."""
    (claim,) = [c for group in ALL.values() for c in group if words in c.says]
    return judged(claim, {name.replace("_", "-"): {"data": of} for name, of in data.items()})[:2]


def cells(**values):
    """A method's A_T and F_T, or None where it diverged."""
    return {
        method.replace("_", "-"): BROKEN
        if value is None
        else {"average": [100 - value, 100.1 - value], "forgetting": [value, value + 0.1]}
        for method, value in values.items()
    }


@pytest.mark.parametrize("broken", [None, "pca_ogd", "a_gem"])
def test_a_claim_with_a_run_that_diverged_is_not_decided(broken):
    good = {"pca_ogd": 2.0, "ogd": 4.0, "sgd": 6.0, "a_gem": 2.0}
    split = good | ({broken: None} if broken else {})
    data = {"rotated": {"released": cells(**good)}, "split": {"released": cells(**split)}}
    words = "PCA-OGD is comparable to A-GEM"
    expected = (
        (UNDECIDED, "")
        if broken
        else (
            HOLDS,
            "released Rotated +0.0 ± 0.0, Split MNIST +0.0 ± 0.0",
        )
    )
    assert verdict(words, protocols=data) == expected
    table = {"rotated": cells(**good), "split": cells(ogd=None if broken else 4.0, sgd=6.0)}
    word = verdict("OGD is more robust to forgetting", table1=table)[0]
    assert word == (UNDECIDED if broken else HOLDS)


def test_a_cell_shows_what_there_is_of_a_run():
    found = {"average": [80.0, 82.0], "forgetting": [3.0, 3.0]}
    assert [cell(None), cell(BROKEN), cell(found)] == ["–", "diverged", "81.0 ± 1.0 / 3.0 ± 0.0"]
    assert cell(BROKEN, lambda of: of["seconds"]) == "diverged"


@pytest.fixture(scope="module")
def scale():
    """Rotated digits alone, so small that a run takes no time."""
    settings = {"train_per_class": 8, "epochs": 1, "samples": 40, "tasks": 2, "hidden": 8}
    benchmark = replace(SMALL.benchmarks["rotated"], settings=settings)
    return replace(SMALL, benchmarks={"rotated": benchmark}, memory=4, memories=(4,), seeds="1")


@pytest.fixture(scope="module")
def workshop(scale, tmp_path_factory):
    """All runs of some artefacts, of which PCA-OGD's, EWC's and GEM-NT's diverged."""
    plain = Workshop(scale, tmp_path_factory.mktemp("runs"), None, "cpu", {})
    methods = [*TABLE1["rotated"], "gem-nt", "joint", "gem"]
    runs = {m: Run(scale.config("rotated", m)) for m in methods}
    plain.train(list(runs.values()))
    for method in ("pca-ogd", "ewc", "gem-nt"):
        trace = plain.trace(runs[method])
        trace.outcome[DIVERGED] = True
        trace.accuracy[:] = float("nan")
        trace.save_record()
    return plain


def measured(artefact, workshop):
    return artefact.measure(workshop, artefact.cells(workshop.scale, {"methods": {}}))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("table1", "| Rotated, EWC | 76.20 ± 0.62 | diverged | **diverged** | 13.44 ± 0.82 |"),
        ("per-task", "None does of what diverged: Rotated EWC, Rotated PCA-OGD."),
        ("forgetting-gap", "| Rotated, PCA-OGD | 11.67 | diverged | diverged |"),
        ("more-methods", "| Rotated | diverged | "),
        ("memory", "| Rotated, PCA-OGD | diverged |"),
    ],
)
def test_what_diverged_is_measured_and_shown_as_such(workshop, monkeypatch, name, shown):
    monkeypatch.setattr(memory, "BENCHMARKS", ("rotated",))
    workshop.begin()
    record = {
        "data": rounded(measured(ARTEFACTS[name], workshop)),
        "scale": "small",
        "seeds": "1",
        "provenance": {"runs": {}, "seconds training": 1, "seconds measuring": 1}
        | dict.fromkeys(("device", "torch", "code"), ""),
    }
    assert shown in "\n".join(ARTEFACTS[name].show(record["data"], Pictures("")))
    # And the page with its verdicts is made.
    assert shown in make_page({name: record}, "images")[0]


def test_table_1_is_not_as_printed_where_it_diverged():
    data = {
        b: {
            m: {"average": [printed.accuracy], "forgetting": [printed.forgetting]}
            for m, printed in of.items()
        }
        for b, of in TABLE1.items()
    }
    assert verdict("A_T of 20 cells", table1=data) == (HOLDS, "20 of 20, p = 1")
    data["rotated"]["ewc"] = BROKEN
    assert verdict("A_T of 20 cells", table1=data) == (FAILS, "19 of 20, p = 0.64")
    assert verdict("F_T of 20 cells", table1=data)[0] == FAILS
    assert not table1.agreement(TABLE1["rotated"]["ewc"], BROKEN)[0]


def test_a_claim_that_compares_what_diverged_is_not_decided():
    memory = {"rotated": {m: dict.fromkeys(("100", "200"), BROKEN) for m in ("ogd", "pca-ogd")}}
    assert verdict("twice as memory efficient", memory=memory)[0] == UNDECIDED


def test_of_the_same_bytes_what_diverged_is_not_the_best():
    names = ("OGD, 9 factored samples", "PCA-OGD, 5 directions", "PCA-OGD, 9 in bfloat16")
    rows = {name: BROKEN | {"bytes": 100 + i} for i, name in enumerate(names)}
    data = {"budget": 100, "methods": rows}
    assert same_bytes.best(data) == ("none", 0.0)
    text = "\n".join(same_bytes.show(data, Pictures("")))
    assert "| PCA-OGD, 5 directions | 0.0 MB | 101 % | diverged | diverged |" in text
    lines = "\n".join(answers({"same-bytes": {"data": data}}))
    assert "It cannot be said: OGD, 9 factored samples and PCA-OGD, 5 directions diverged." in lines


def test_of_the_same_bytes_what_diverged_is_measured(workshop, monkeypatch):
    run = table1.cell_run(workshop.scale, "rotated", "pca-ogd")
    monkeypatch.setattr(same_bytes, "variants", lambda *_: {"PCA-OGD": (run, 7.0)})
    monkeypatch.setattr(same_bytes, "_budget", lambda *_: 7)
    workshop.begin()
    assert measured(same_bytes.SAME_BYTES, workshop)["methods"] == {
        "PCA-OGD": BROKEN | {"bytes": 7.0}
    }


def test_a_gem_has_no_place_where_it_diverged():
    data = {"cifar": {"released": cells(a_gem=None, sgd=2.0), "frozen": cells(a_gem=1, sgd=2.0)}}
    lines = "\n".join(answers({"protocols": {"data": data}}))
    assert "With proper heads, on the network as released number 1 of 2: A_T 99.0 ± 0.0" in lines
    assert "where all of the network trains not measured yet; as released diverged." in lines
