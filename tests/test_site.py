"""The site has every public name, and its check finds links that lead nowhere."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from scripts.check_site import broken

import forgetless
from forgetless import guard

REFERENCE = sorted((Path(__file__).parent.parent / "docs" / "api").glob("*.md"))
TEXT = "\n".join(page.read_text("utf-8") for page in REFERENCE)


def test_the_reference_has_all_public_names():
    wholes = re.findall(r"automodule:: (\S+)\n   :members:", TEXT)
    named = {path.rpartition(".")[2] for path in re.findall(r"auto\w+:: (\S+)", TEXT)}
    named |= {name for package in wholes for name in import_module(package).__all__}
    assert {"forgetless.theory", "forgetless.llm", "forgetless.report.plots"} < set(wholes)
    assert {*forgetless.__all__, *guard.__all__} - named == {"__version__"}


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ('<a href="there.html#place">', None),
        ('<a href="#top">', None),
        ('<a href="https://example.org">', None),
        ('<img src="picture.png">', None),
        ('<a href="there.html#elsewhere">', "there.html#elsewhere leads nowhere"),
        ('<a href="gone.html">', "gone.html leads nowhere"),
        ('<img src="gone.png">', "gone.png leads nowhere"),
        ('<script src="https://example.org/a.js">', "loads https://example.org/a.js"),
    ],
)
def test_links_are_followed(tmp_path, link, fault):
    (tmp_path / "index.html").write_text(f'<p id="top">{link}')
    (tmp_path / "there.html").write_text('<p id="place">')
    (tmp_path / "picture.png").touch()
    found = broken(tmp_path)
    assert found == ([] if fault is None else [f"{tmp_path / 'index.html'}: {fault}"])
