"""The code around a user's class or function: what changes it, and what does not."""

import subprocess
import sys

import pytest

from forgetless.support.plugins import code_of, load_object
from forgetless.support.provenance import code_around

SCRIPT = """
import helper
from pack import part
from tables import *
from forgetless import Training

SCALE = 2.0
TABLE = {}
TABLE["a"] = 1
EPOCHS = 3

def inner(x):
    return x * SCALE

def scaled(x):
    from late import shift
    return shift(inner(x)) + TABLE["a"]

class Kind:
    def update(self, g):
        return scaled(helper.double(g)) + part.LENGTH + FROM_STAR

class Child(Kind):
    pass

made = lambda: Kind()

if __name__ == "__main__":
    training = Training(epochs=EPOCHS)
    print(Kind(), training)
"""
FILES = {
    "mine.py": SCRIPT,
    "helper.py": "import deep\ndef double(x):\n    return deep.FACTOR * x\n",
    "deep.py": "FACTOR = 2\n",
    "tables.py": "FROM_STAR = 1\n",
    "late.py": "def shift(x):\n    return x + 1\n",
    "pack/__init__.py": "",
    "pack/part.py": "from . import sibling\nLENGTH = sibling.N\n",
    "pack/sibling.py": "N = 1\n",
    "other.py": "N = 1\n",
}
COUNT = [
    ("mine.py", "SCALE = 2.0", "SCALE = 3.0"),
    ("mine.py", "return x * SCALE", "return x / SCALE"),
    ("mine.py", 'TABLE["a"] = 1', 'TABLE["a"] = 2'),
    ("helper.py", "deep.FACTOR * x", "deep.FACTOR + x"),
    ("deep.py", "2", "3"),
    ("tables.py", "1", "2"),
    ("late.py", "x + 1", "x + 2"),
    ("pack/__init__.py", "", "SIDE = 1"),
    ("pack/sibling.py", "1", "2"),
]
DO_NOT = [
    ("mine.py", "EPOCHS = 3", "EPOCHS = 4"),
    ("mine.py", "print(Kind(), training)", "print(Kind())"),
    ("mine.py", "SCALE = 2.0", "SCALE = 2.0  # a comment"),
    ("other.py", "1", "2"),
]


def code_in(folder, monkeypatch, files=FILES, names=("Kind", "Child", "made")):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("helper", "deep", "tables", "late", "pack", "pack.part", "pack.sibling"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        return [code_of(load_object(f"{folder}/mine.py:{name}", "--from")) for name in names]
    finally:
        for name in ("helper", "deep", "tables", "late", "pack", "pack.part", "pack.sibling"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(("file", "old", "new"), COUNT)
def test_what_a_class_or_function_uses_counts(file, old, new, tmp_path, monkeypatch):
    changed = FILES | {file: FILES[file].replace(old, new, 1)}
    one = code_in(tmp_path / "one", monkeypatch)
    two = code_in(tmp_path / "two", monkeypatch, changed)
    assert [a != b for a, b in zip(one, two, strict=True)] == [True] * 3


@pytest.mark.parametrize(("file", "old", "new"), DO_NOT)
def test_other_statements_and_files_do_not_count(file, old, new, tmp_path, monkeypatch):
    changed = FILES | {file: FILES[file].replace(old, new, 1)}
    assert changed != FILES
    one = code_in(tmp_path / "one", monkeypatch)
    assert one == code_in(tmp_path / "two", monkeypatch, changed)


def test_a_callable_object_is_its_class(tmp_path, monkeypatch):
    text = "N = 1\nclass Make:\n    def __call__(self):\n        return N\nmake = Make()\n"
    one = code_in(tmp_path / "one", monkeypatch, {"mine.py": text}, ["make"])
    two = code_in(tmp_path / "two", monkeypatch, {"mine.py": text.replace("1", "2")}, ["make"])
    assert one != two


def test_code_of_installed_packages_and_of_no_file_has_none():
    typed = (
        "from forgetless.support.provenance import code_around\n"
        "def f(): pass\nprint([code_around(f)])"
    )
    found = subprocess.run(
        [sys.executable, "-c", typed], capture_output=True, check=True, text=True
    )
    assert found.stdout.strip() == "['']"
    assert code_around(pytest.Item) == code_around(code_of) == code_around(subprocess.run) == ""
