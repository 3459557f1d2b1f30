"""Runs on a real Ray cluster of two nodes, one of which dies half way."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from forgetless.launch.engines import Cluster, Job
from forgetless.launch.runs import status_of
from forgetless.paper.results import load_results
from tests.conftest import forgetless

from . import patient
from .kills import LONG, connect, node_of, ray_nodes
from .problems import Events, assert_alike, order, trained

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'forgetless[ray]'")


PATIENT = f"{Path(patient.__file__)}:PatientOGD"


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    """The file that lets PATIENT go on in the cluster."""
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture
def closed(gate):
    """The same, closed at the start of a test: a job is still running when it is to be killed."""
    gate.unlink(missing_ok=True)
    yield gate
    gate.touch()


@pytest.fixture(scope="module")
def nodes(gate):
    with ray_nodes(2, {patient.GATE: str(gate)}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The runs as one process trains them."""
    folder = tmp_path_factory.mktemp("expected")
    orders = [order(folder / "sgd", "sgd"), order(folder / "ogd", **LONG)]
    orders.append(order(folder / "patient", PATIENT, **LONG))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(patient.GATE, raising=False)
        assert set(trained(orders).values()) == {None}
    return folder


def test_both_nodes_work_and_the_traces_are_those_of_one_process(nodes, expected, tmp_path):
    events = Events()
    orders = [order(tmp_path / "sgd", "sgd"), order(tmp_path / "ogd", **LONG)]
    assert trained(orders, Cluster(), events) == {"sgd": None, "ogd": None}
    for method in ("sgd", "ogd"):
        assert_alike(tmp_path / method, expected / method)
    kinds = events.kinds()
    assert (kinds.count("begun"), kinds.count("finished"), len(kinds)) == (4, 4, 12)
    assert len({e.worker for e in events if e.kind == "begun"}) >= 2


def test_bad_settings_of_a_job_are_an_error_of_the_run(nodes, tmp_path):
    (error,) = trained([order(tmp_path / "a", freeze="zzz")], Cluster()).values()
    assert "freeze must be the beginning of a parameter's name" in str(error)
    assert not list(tmp_path.rglob("*.json"))


# A node may die while it writes a checkpoint, which is then told, and the one before is taken.
@pytest.mark.filterwarnings("ignore:.*the run resumes from the checkpoint before it")
def test_a_node_that_dies_half_way_loses_nothing(nodes, closed, expected, tmp_path):
    """All its processes are killed at once, as when a machine loses its power."""
    shared = f"file://{tmp_path}/shared"
    events, killed = Events(), []

    def watch(event):
        events(event)
        far = event.progress is not None and event.progress.task >= 3
        if far and not killed:
            killed.append(event.job)
            nodes.remove_node(node_of(nodes, event.worker), allow_graceful=False)
            closed.touch()

    here = order(tmp_path / "here" / "patient", PATIENT, **LONG)
    wanted = replace(here, shared=f"{shared}/patient")
    assert trained([wanted], Cluster(), watch) == {"patient": None}
    assert len(killed) == 1
    assert_alike(tmp_path / "here" / "patient", expected / "patient")
    assert_alike(tmp_path / "shared" / "patient", expected / "patient")
    kinds = [(e.kind, e.job) for e in events if e.kind != "progress"]
    assert ("retried", killed[0]) in kinds
    at = [n for n, e in enumerate(events) if e.kind == "retried" and e.job == killed[0]]
    after = [e for e in events[at[0] :] if e.progress and e.job == killed[0]]
    assert after[0].progress.task >= 2  # from what was saved, not from the beginning
    assert len(nodes.worker_nodes) == 1
    assert node_of(nodes, after[0].worker) in nodes.worker_nodes


def test_who_stops_asking_stops_the_jobs_and_they_go_on_later(nodes, closed, expected, tmp_path):
    class Enough(Exception):
        pass

    def watch(event):
        if event.progress is not None and event.progress.done > 0.3:
            raise Enough

    wanted = order(tmp_path / "patient", PATIENT, **LONG)
    with pytest.raises(Enough):
        trained([wanted], Cluster(), watch)
    assert status_of(tmp_path / "patient", wanted.config).kind == "unfinished"
    closed.touch()
    assert trained([wanted], Cluster()) == {"patient": None}
    assert_alike(tmp_path / "patient", expected / "patient")


def test_a_killed_worker_of_the_cluster_is_replaced(nodes, closed, expected, tmp_path):
    killed: list[Job] = []

    def watch(event):
        if event.progress is not None and event.progress.task >= 2 and not killed:
            killed.append(event.job)
            os.kill(int(event.worker.split()[1]), signal.SIGKILL)
            closed.touch()

    orders = [order(tmp_path / "patient", PATIENT, **LONG)]
    assert trained(orders, Cluster(), watch) == {"patient": None}
    assert len(killed) == 1
    assert_alike(tmp_path / "patient", expected / "patient")


def test_the_command(nodes, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = ["--tasks", "2", "--epochs", "1", "--train-per-class", "10", "--no-analyse"]
    command = ["compare", "rotated-digits", "--methods", "sgd,ewc", *quick, "--engine", "ray"]
    status, out, err = forgetless([*command, "--out", f"file://{tmp_path}/a"], capsys)
    assert status == 0, err
    assert f"are in file://{tmp_path}/a" in out
    assert "; 2 of 2 jobs done, " in err.splitlines()[-1]
    assert forgetless([*command[:-2], "--out", "b"], capsys)[0] == 0
    for method in ("sgd", "ewc"):
        assert_alike(tmp_path / "a" / method, tmp_path / "b" / method)


def test_a_build_of_the_paper(nodes, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build = ["paper", "build", "table1", "--scale", "small", "--device", "cpu", "--seeds", "1"]
    found = []
    for engine, runs in (("ray", f"file://{tmp_path}/shared"), ("local", "here")):
        places = ["--runs", runs, "--results", engine, "--page", f"{engine}/page.md"]
        status, _, err = forgetless([*build, "--engine", engine, *places], capsys)
        assert status == 0, err
        data = load_results(tmp_path / engine, ["table1"])["table1"]["data"]
        found.append({(b, m): of[m]["final"] for b, of in data.items() for m in of})
    assert found[0] == found[1]
    assert len(found[0]) == 20


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:9"])
def test_no_cluster_is_one_sentence(address, nodes, capsys):
    ray.shutdown()
    try:
        command = ["compare", "rotated-digits", "--engine", "ray", "--address", address]
        status, out, err = forgetless(command, capsys)
    finally:
        connect(nodes)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"no Ray cluster can be used at {address}" in err


def test_without_ray_one_sentence_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    status, out, err = forgetless(["compare", "rotated-digits", "--engine", "ray"], capsys)
    assert (status, out) == (2, "")
    assert err == "forgetless: --engine ray needs Ray: pip install 'forgetless[ray]'\n"
