"""A release: what is in it, which versions it allows, and its page in a package index."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from scripts.check_dist import faults
from setup import page

import forgetless

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A wheel and a source distribution, built from a copy."""
    copy = tmp_path_factory.mktemp("release")
    for file in ROOT.iterdir():
        if file.is_file() and file.name != ".git":
            shutil.copy(file, copy)
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=left_out)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy / "dist"


def test_the_distributions_have_what_they_must_and_nothing_else(built):
    assert faults(built) == []


def test_the_check_finds_what_is_too_few_and_too_many(built, tmp_path):
    for file in built.iterdir():
        shutil.copy(file, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    add = "import sys, zipfile; zipfile.ZipFile(sys.argv[1], 'a').writestr('forgetless/x.log', '')"
    subprocess.run([sys.executable, "-c", add, wheel], check=True)
    assert faults(tmp_path) == [f"{wheel.name} has forgetless/x.log"]


def test_the_oldest_versions_are_those_that_are_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    oldest = dict(re.findall(r"^([\w-]+)==([\d.]+)$", read("constraints-oldest.txt"), re.M))
    for requirement in project["dependencies"]:
        name, least = requirement.split(">=")
        assert f"{oldest[name]}.".startswith(f"{least}."), name
    assert {*oldest} - {"click"} == {r.split(">=")[0] for r in project["dependencies"]}


def test_all_speak_of_one_version():
    assert f"\nversion: {forgetless.__version__}\n" in read("CITATION.cff")
    assert re.search(r"^## (\S+?),? ", read("CHANGELOG.md"), re.M)[1] == forgetless.__version__


def test_the_page_in_an_index_has_no_relative_link():
    readme = read("README.md")
    known = page(readme, "https://example.org/a/b", "1.2.3")
    assert "](https://example.org/a/b/blob/v1.2.3/docs/guard.md#which-method)" in known
    assert "](https://example.org/a/b/raw/v1.2.3/docs/images/rotated-mnist.png)" in known
    for text in (known, page(readme, None, "1.2.3")):
        assert set(re.findall(r"\]\((\w*)", text)) == {"https"}
    assert "![" not in page(readme, None, "1.2.3")


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")
