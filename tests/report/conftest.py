"""Short runs on digits, real traces, their pages, and a browser to open them in."""

from pathlib import Path

import numpy as np
import pytest

from forgetless import SGD, Training, fit
from forgetless.launch.runs import resolve, run
from forgetless.report.analysis import cached_analysis
from forgetless.report.comparison import compare, find_traces
from forgetless.report.page import write_page
from forgetless.trace import Trace, load_trace
from tests.conftest import blobs

TABLE1 = Path(__file__).parents[2] / "results" / "table1"
TINY = {"tasks": 3, "epochs": 2, "train_per_class": 12, "memory": 8, "samples": 40, "hidden": 20}
SHORT = {"tasks": 3, "epochs": 3, "train_per_class": 15, "memory": 10, "hidden": 20}


def train(folder: Path, scenario: str, method: str, **settings) -> Trace:
    return run(resolve(scenario, method, device="cpu", **settings), out=folder)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One browser for all tests of a process, or a skip that says what is missing."""
    pytest.importorskip("selenium", reason="needs selenium, which the dev extra installs")
    from tests.report import chromium

    if (lacking := chromium.missing()) is not None:
        pytest.skip(lacking)
    opened = chromium.Browser(tmp_path_factory.mktemp("downloads"))
    yield opened
    opened.quit()


@pytest.fixture(scope="session")
def mnist_traces() -> list[Trace]:
    """Rotated MNIST with five methods and five seeds, as committed."""
    return find_traces([TABLE1 / "rotated-mnist"])[0]


@pytest.fixture(scope="session")
def digits_traces(tmp_path_factory) -> list[Trace]:
    """Three methods with two seeds on rotated digits, with their weights."""
    root = tmp_path_factory.mktemp("digits")
    methods = ("sgd", "ewc", "pca-ogd")
    return [train(root / m, "rotated-digits", m, seeds="2", **TINY) for m in methods]


@pytest.fixture(scope="session")
def stopped_trace(tmp_path_factory) -> Trace:
    """A run that Ctrl-C ended after two of five tasks."""
    folder = tmp_path_factory.mktemp("stopped") / "run"

    def stop(progress) -> None:
        if progress.task == 3:
            raise KeyboardInterrupt

    config = resolve("rotated-digits", "sgd", device="cpu", **TINY | {"tasks": 5})
    with pytest.raises(KeyboardInterrupt):
        run(config, out=folder, observer=stop)
    return load_trace(folder)


@pytest.fixture(scope="session")
def long_traces() -> list[Trace]:
    """Fifty tasks, of points so that it does not take long."""
    tasks, training = blobs(tasks=50), Training(lr=0.1, epochs=1, batch_size=12)
    return [fit(tasks, SGD(), training=training, keep="nothing")]


def hostile_trace() -> Trace:
    """A trace whose names are code, very long, and written from right to left."""
    names = (
        "<script>window.hacked = 1</script>",
        "x" * 300,
        "משימה ראשונה ‏&amp; <b>bold</b>",
        "</script><img src=x onerror='window.hacked = 1'>\u2028",
    )
    accuracy = np.array(
        [[90.0 - 7 * (t - s) if s <= t else np.nan for s in range(4)] for t in range(4)]
    )
    return Trace(
        scenario="<img src=x onerror=alert(1)>",
        method="'\"><svg onload=alert(2)>",
        seeds=(0,),
        tasks=names,
        accuracy=accuracy[None],
        config={"</td><script>": "<!--"},
        versions={"forgetless": "<i>0</i>"},
        status="complete",
    )


@pytest.fixture(scope="session")
def pages(request, tmp_path_factory):
    """A function from the name of a case to its page, each made once."""
    root, made = tmp_path_factory.mktemp("pages"), {}

    def page(name: str) -> Path:
        if name not in made:
            traces, analyses = CASES[name](request.getfixturevalue)
            made[name] = write_page(traces, root / f"{name}.html", analyses, command="forgetless …")
        return made[name]

    return page


def _with_analysis(traces: list[Trace]):
    comparison = compare(traces)[0]
    reasons = {e.label: cached_analysis(e.parts[0], samples=30) for e in comparison.entries}
    return [comparison], [reasons]


CASES = {
    "mnist": lambda get: (get("mnist_traces"), []),
    "digits": lambda get: _with_analysis(get("digits_traces")),
    "single": lambda get: _with_analysis(get("digits_traces")[2:]),
    "stopped": lambda get: _with_analysis([get("stopped_trace")]),
    "long": lambda get: (get("long_traces"), []),
    "cifar": lambda get: (find_traces([TABLE1 / "split-cifar100"])[0], []),
    "hostile": lambda get: ([hostile_trace()], []),
    "several": lambda get: (find_traces([TABLE1])[0], []),
}


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """A function from a scenario and a method to the trace of a short run, each made once."""
    made = {}

    def trace(scenario: str, method: str, **more):
        key = scenario, method, tuple(sorted(more.items()))
        if key not in made:
            config = resolve(scenario, method, device="cpu", **SHORT | {"samples": 60} | more)
            made[key] = run(config, out=tmp_path_factory.mktemp("runs") / method)
        return made[key]

    return trace
