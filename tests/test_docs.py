"""The Python in the documentation runs as it stands there."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [p for p in sorted(DOCS.glob("*.md")) if "```python" in p.read_text("utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
