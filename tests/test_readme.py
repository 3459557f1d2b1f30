"""The README's Python runs as it stands there."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_readmes_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert "(2, 3, 3)" in capsys.readouterr().out
    assert "0.weight" in names["weights"]


def test_a_method_fits_in_forty_lines():
    last = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)[-1]
    assert "class Replay" in last
    assert len(last.splitlines()) < 40
