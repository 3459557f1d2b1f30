"""The numbers on the page about the theory are what its Python computes."""

import inspect
import json
import math
import re
from pathlib import Path

import pytest
import torch
from scripts import unprotected

from forgetless import theory

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "theory.md"


def test_the_page_says_what_its_python_computes():
    text = PAGE.read_text("utf-8")
    names: dict[str, object] = {"__name__": "theory"}
    with torch.random.fork_rng():
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(compile(block, "theory.md", "exec"), names)
    parts, learned, trained = names["parts"], names["learned"], names["trained"]
    assert [f.shape for f in names["features"]] == [(40, 2260)] * 4
    assert names["z"][0].shape == (40, 160)
    assert parts.total == pytest.approx(0.2906, abs=1e-4)
    for other in (learned, trained):
        assert float(other.drift(0, 3).square().sum()) == pytest.approx(parts.total, rel=1e-8)
    assert parts.by_task.tolist() == pytest.approx([0.2347, 0.0590, -0.0031], abs=1e-4)
    assert int(parts.by_direction.argmax()) == 10
    bound = theory.bounds(learned, 0, 3)
    assert (bound.printed, bound.valid, bound.tight) == pytest.approx((19.7, 58.9, 7.4), abs=0.1)

    tasks = names["tasks"]
    sgd = theory.learn(tasks, theory.NoProjection(), weight_decay=0.1)
    gem = theory.learn(tasks, theory.GradientProjection(10), weight_decay=0.1)
    spectra = [theory.overlap_spectrum(x.overlap(0, 3)) for x in (learned, sgd)]
    assert [float(s[0]) for s in spectra] == pytest.approx([0.33, 0.55], abs=0.01)
    assert theory.decompose(sgd, 0, 3).total == pytest.approx(5.90, abs=0.01)
    centred = names["centred"]
    assert theory.decompose(centred, 0, 3).total == pytest.approx(5.07, abs=0.01)
    assert names["delta"] == pytest.approx(1.32, abs=0.01)
    assert theory.bounds(centred, 0, 1).printed == pytest.approx(0.95, abs=0.01)
    assert theory.bounds(gem, 0, 3).printed > theory.bounds(sgd, 0, 3).printed

    frozen = names["frozen"]
    assert theory.decompose(frozen, 0, 3).total == pytest.approx(8.68, abs=0.01)
    assert theory.bounds(frozen, 0, 3).unprotected == pytest.approx(240, abs=1)
    assert theory.bounds(sgd, 0, 3).unprotected == pytest.approx(200, abs=1)
    share = theory.unprotected_share(names["features"][0], names["freezing"][1])
    assert share == pytest.approx(0.37, abs=0.005)


def test_the_table_is_that_of_the_recorded_results():
    record = json.loads((ROOT / "results/theory/unprotected.json").read_text("utf-8"))
    assert unprotected.table(record) in PAGE.read_text("utf-8")


def test_correlations_are_of_ranks_at_each_pair():
    """Two pairs of tasks: in one a method with twice the overlap loses most, in one least."""
    runs = [
        {"method": f"KronOGD {m}", "seed": 0, "source": 0, "target": pair, "lost": 1.0}
        | {"moved": (10.0**m) * sign}
        | dict.fromkeys(unprotected.QUANTITIES, float(m) + pair)
        for pair, sign in ((1, 1), (2, -1))
        for m in (1, 2, 3)
    ]
    assert unprotected.correlations(runs[:3])["methods"]["bound"]["moved"] == pytest.approx(1)
    found = unprotected.correlations(runs)
    assert found["energies"]["overlap"]["moved"] == pytest.approx(0)
    assert math.isnan(found["all"]["overlap"]["lost"])  # it never differs


def test_the_page_names_every_function():
    text = PAGE.read_text("utf-8")
    rooms = ("drift", "forgetting", "learner", "overlap")
    for name in theory.__all__:
        thing = getattr(theory, name)
        if inspect.isfunction(thing) and thing.__module__.split(".")[-1] in rooms:
            assert f"`{name}`" in text or f"theory.{name}(" in text, name
