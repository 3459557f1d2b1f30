"""Imports point one way: each room imports only the rooms listed for it, and all of those."""

import ast
from collections import Counter
from pathlib import Path

import forgetless

ROOT = Path(forgetless.__file__).parent

# Room → the rooms it imports, all of them above it in this table. A folder is one room.
ROOMS = {
    "support": "",
    "linalg": "",
    "tangent": "support linalg",
    "subspace": "support linalg tangent",
    "methods": "support linalg tangent subspace",
    "theory": "support linalg tangent",
    "data": "support",
    "trace": "support",
    "training": "support linalg tangent subspace methods theory data trace",
    "launch": "support linalg methods theory data trace training",
    "report": "support linalg tangent subspace methods theory data trace training launch",
    "guard": "support linalg tangent subspace methods report",
    "paper": "support linalg tangent methods theory data trace training launch report",
    "llm": "support tangent methods guard report",
    "cli": "support methods theory data trace training launch report paper llm",
}


def imports(file: Path) -> set[str]:
    """The rooms that a file imports, wherever in the file."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            package = node.module == "forgetless"
            names += [f"forgetless.{a.name}" for a in node.names] if package else [node.module]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("forgetless.")}


def files(room: str) -> list[Path]:
    return [*ROOT.glob(f"{room}.py"), *(ROOT / room).rglob("*.py")]


def test_every_file_is_in_a_room():
    found = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__main__", "__pycache__", "py"} == set(ROOMS)


def test_rooms_import_what_the_table_says_and_nothing_else():
    above: list[str] = []
    for room, allowed in ROOMS.items():
        used = set().union(*(imports(file) for file in files(room))) - {room}
        assert used == set(allowed.split()), f"{room} imports {sorted(used)}"
        assert used <= set(above), f"{room} imports a room below it"
        above.append(room)


def test_no_two_classes_share_a_name():
    trees = [ast.parse(file.read_text()) for file in ROOT.rglob("*.py")]
    names = Counter(n.name for tree in trees for n in tree.body if isinstance(n, ast.ClassDef))
    assert not {name for name, count in names.items() if count > 1}


# Tests of several modules at once, and of what users write.
WHOLE = {
    "cli": "plugins",
    "guard": "as_fit",
    "guard/distributed": "page states worlds",
    "guard/frameworks": "extras peft processes",
    "methods": "avalanche all_methods consolidation laws new_method own_methods",
    "paper": "claims diverged",
    "theory": "bad_input theory_page",
}


def test_tests_mirror_the_source():
    """`tests/room/test_module.py`, or `test_module_aspect.py` for a part of its tests."""
    here = Path(__file__).parent
    for file in here.rglob("test_*.py"):
        folder = file.parent.relative_to(here).as_posix()
        name = file.stem.removeprefix("test_")
        if folder in (".", "faults") or name in WHOLE.get(folder, "").split():
            continue
        parts = name.split("_")
        modules = ("_".join(parts[:n]) for n in range(1, len(parts) + 1))
        assert any((ROOT / folder / f"{m}.py").exists() for m in modules), f"{folder}/{file.name}"
