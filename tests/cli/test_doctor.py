"""The command that says what is installed here."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

from forgetless.cli import doctor
from forgetless.cli.doctor import Package
from tests.conftest import forgetless


@pytest.fixture
def no_data(monkeypatch, tmp_path):
    monkeypatch.delenv("FORGETLESS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("no_data")
def test_everything_is_told_as_json_too(capsys, tmp_path):
    status, out, err = forgetless(["doctor", "--json"], capsys)
    found = json.loads(out)
    assert (status, err, found["broken"]) == (0, "", [])
    assert found["versions"]["torch"] == version("torch")
    assert found["threads"]["torch"] == torch.get_num_threads()
    cpu = found["devices"][0]
    assert cpu["device"] == "cpu"
    assert 0 < cpu["free"] <= cpu["memory"]
    assert found["data"]["datasets"]["digits"]["verified"]
    assert not found["data"]["datasets"]["mnist"]["verified"]
    assert found["data"]["searched"] == [str(tmp_path / "forgetless")]
    assert {"lightning", "ray", "fast", "wandb"} < set(found["extras"])
    assert "dev" not in found["extras"]
    for extra in found["extras"].values():
        assert extra["installed"] == all(package["found"] for package in extra["packages"])


@pytest.mark.usefixtures("no_data")
def test_people_read_lines_and_a_verdict(capsys, tmp_path):
    status, out, _ = forgetless(["doctor"], capsys)
    *lines, verdict = out.splitlines()
    assert status == 0
    assert verdict.startswith("Ready to train on ")
    assert "mnist, fashion-mnist, cifar10, cifar100" in verdict
    (mnist,) = (line for line in lines if " mnist " in line)
    assert mnist.endswith("not on this machine; forgetless data fetch mnist")
    (digits,) = (line for line in lines if " digits " in line)
    assert "verified" in digits
    assert any(f"{tmp_path / 'forgetless'}" in line for line in lines)


def test_a_folder_that_the_user_named_is_searched_first(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FORGETLESS_DATA", str(tmp_path))
    found = json.loads(forgetless(["doctor", "--json"], capsys)[1])
    assert found["data"]["searched"][0] == str(tmp_path)


@pytest.mark.usefixtures("no_data")
def test_a_missing_extra_says_how_to_get_it(monkeypatch, capsys):
    here = doctor._installed
    monkeypatch.setattr(doctor, "_installed", lambda n: None if n == "numba" else here(n))
    _, out, _ = forgetless(["doctor"], capsys)
    assert 'numba is missing; pip install "forgetless[fast]"' in out
    assert "fast" in out.splitlines()[-1]


@pytest.mark.usefixtures("no_data")
def test_an_old_package_of_the_core_is_no_good(monkeypatch, capsys):
    here = doctor._installed
    monkeypatch.setattr(doctor, "_installed", lambda n: "1.13.0" if n == "torch" else here(n))
    status, out, _ = forgetless(["doctor"], capsys)
    assert status == 2
    assert "Not ready: torch 1.13.0, needs >=" in out.splitlines()[-1]


def test_it_runs_where_torch_does_not(tmp_path):
    """A torch that cannot be imported, as one that was built for another machine."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12 is missing')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "forgetless", "doctor"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    verdict = done.stdout.splitlines()[-1]
    assert verdict.startswith("Not ready: torch or what it needs cannot be imported (libcudart")
    assert done.stderr == ""


@pytest.mark.parametrize("found", ["2.5.1", "2.6", "2.6.0+cpu", "2.13.0", "3.0.0rc1", "10.1"])
def test_versions_are_compared_as_packaging_does(found):
    assert Package("torch", ">=2.6", found).will_do == (Version(found) >= Version("2.6"))
    assert not Package("torch", ">=2.6", None).will_do
    assert Package("torch", "", found).will_do
