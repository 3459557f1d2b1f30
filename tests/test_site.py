"""The check of the built site finds links that lead nowhere."""

import pytest
from scripts.check_site import broken


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
