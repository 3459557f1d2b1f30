"""Imports point one way: each room may read only the rooms below it."""

import ast
from pathlib import Path

import forgetless

ROOT = Path(forgetless.__file__).parent

# Room → the rooms it may import. A folder is one room.
ALLOWED = {
    "errors": set(),
    "version": set(),
    "accepted": {"errors"},
    "options": {"accepted"},
    "streams": set(),
    "provenance": {"version"},
    "linalg": {"errors"},
    "ranks": {"errors"},
    "tangent": {"called", "errors", "linalg"},
    "called": set(),
    "capturing": set(),
    "subspace": {"accepted", "capturing", "errors", "linalg", "ranks", "tangent"},
    "methods": {"accepted", "errors", "linalg", "options", "subspace", "tangent"},
    "data": {"accepted", "errors", "options", "streams"},
    "models": {"accepted", "errors", "options"},
    "metrics": {"errors"},
    "notebook": set(),
    "sizes": {"errors"},
    "atomic": {"errors"},
    "beside": {"atomic"},
    "signals": set(),
    "trace": {"atomic", "errors", "metrics", "notebook"},
    "checkpoint": {"atomic", "errors"},
    "footprint": {"errors", "methods", "sizes", "subspace", "tangent"},
    "batched": set(),
    "perceptron": set(),
    "network": {"batched", "called", "capturing", "errors", "methods", "perceptron", "tangent"},
    "frozen": {"called", "data", "network", "perceptron"},
    "driver": {"data", "methods", "network", "streams", "tangent"},
    "graphs": {"capturing", "driver", "methods"},
    "finite": {"errors"},
    "learner": {
        "data", "driver", "finite", "frozen", "graphs", "methods", "network", "streams",
        "subspace", "tangent",
    },
    "snapshot": {"learner", "methods"},
    "training": {"accepted", "errors", "options", "sizes"},
    "assembly": {
        "data", "errors", "learner", "methods", "models", "network", "streams", "subspace",
        "training",
    },
    "saving": {
        "checkpoint", "data", "errors", "learner", "methods", "signals", "snapshot", "subspace",
        "trace",
    },
    "course": {
        "data", "driver", "errors", "footprint", "learner", "saving", "signals", "sizes",
        "snapshot", "subspace", "tangent", "trace", "training",
    },
    "fit": {
        "accepted", "assembly", "checkpoint", "course", "data", "errors", "footprint", "learner",
        "methods", "provenance", "saving", "signals", "streams", "subspace", "trace", "training",
    },
    "guard": {
        "accepted", "called", "capturing", "errors", "footprint", "linalg", "methods", "ranks",
        "sizes",
        "streams", "subspace", "tangent",
    },
    "distributed": {"errors", "guard", "ranks"},
    "integrations": {"errors", "guard", "methods", "subspace"},
    "config": {"data", "errors", "methods", "models", "options", "training"},
    "runs": {
        "assembly", "checkpoint", "config", "data", "errors", "fit", "methods", "models", "trace",
        "training",
    },
    "rebuild": {"config", "data", "errors", "models", "trace"},
    "comparison": {"config", "errors", "metrics", "notebook", "trace"},
    "analysis": {
        "accepted", "beside", "data", "errors", "models", "rebuild", "subspace", "tangent",
        "theory", "trace",
    },
    "page": {
        "atomic", "analysis", "comparison", "config", "errors", "metrics", "options", "trace",
    },
    "plots": {"atomic", "analysis", "comparison", "errors", "metrics", "trace"},
    "loggers": {"errors", "metrics", "training"},
    "engines": {
        "assembly", "atomic", "checkpoint", "comparison", "config", "data", "errors", "fit",
        "models", "runs", "signals", "sizes", "trace", "training",
    },
    "report": {"linalg", "metrics", "tangent", "trace"},
    "theory": {"accepted", "called", "errors", "linalg", "metrics", "tangent", "trace", "subspace"},
    "paper": {
        "assembly", "atomic", "beside", "config", "data", "driver", "engines", "errors", "fit",
        "linalg", "methods", "metrics", "models", "provenance", "runs", "streams", "subspace",
        "tangent", "theory", "trace", "training",
    },
    "cli": {
        "analysis", "atomic", "checkpoint", "comparison", "config", "data", "engines", "errors",
        "loggers", "methods", "models", "options", "page", "paper", "plots", "rebuild", "report",
        "runs", "fit", "signals", "theory", "trace", "training", "version",
    },
}  # fmt: skip


def imports(file: Path) -> set[str]:
    """The rooms of the package that a file imports, wherever in the file."""
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            names = [node.module or ""]
            if node.module == "forgetless":
                names = [f"forgetless.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {n.split(".")[1] for n in names if n.startswith("forgetless.")}
    return rooms


def room(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def test_imports_point_one_way():
    for file in ROOT.rglob("*.py"):
        name = room(file)
        if name in ("__init__", "__main__"):
            continue
        assert name in ALLOWED, f"{name} is a new room: say what it may import"
        extra = imports(file) - ALLOWED[name] - {name}
        assert not extra, f"{file.relative_to(ROOT)} must not import {', '.join(sorted(extra))}"


def test_the_table_has_no_cycle():
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {r for r, below in ALLOWED.items() if r not in done and below <= done}
        assert ready, f"rooms in a cycle: {set(ALLOWED) - done}"
        done |= ready


def test_files_can_be_read_in_a_sitting():
    for file in ROOT.rglob("*.py"):
        lines = len(file.read_text().splitlines())
        assert lines <= 300, f"{file.relative_to(ROOT)} has {lines} lines"
