"""The documentation is true: its Python runs, and the files, rooms and options it names exist."""

import csv
import doctest
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

import forgetless
from forgetless import Method, guard
from forgetless.launch.runs import setting_fields
from forgetless.launch.search import described, load_search
from forgetless.methods import View, method_label
from forgetless.support.validation import flag, format_bytes
from tests.test_layers import ROOMS

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
# `make docs` executes the notebooks.
WITH_PYTHON = [
    p for p in PAGES if "```python" in p.read_text("utf-8") and p.parent.name != "notebooks"
]
# Options of commands, which are no settings of a run, and of other programs.
OF_COMMANDS = [
    "--version",
    "--install-completion",
    "--show-completion",
    "--data",
    "--out",
    "--overwrite",
    "--resume",
    "--checkpoint-every",
    "--keep",
    "--log",
    "--json",
    "--analyse",
    "--linearised",
    "--from",
    "--set",
    "--engine",
    "--address",
    "--jobs",
    "--open",
    "--help",
    "--method",
    "--methods",
    "--source",
    "--target",
    "--runs",
    "--no-train",
    "--scale",
    "--from",
    "--set",
    "--head",
    "--port",
    "--only",
    "--tokens",
    "--exclude",
    "--grid",
    "--sampler",
    "--trials",
    "--extend",
    "--best",
    "--against",
    "--test",
    "--csv",
    "--latex",
    "--tiny",
]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def run(page: Path) -> dict[str, object]:
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), names)
    return names


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda p: p.name)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run(page)
    if page.name == "README.md":
        assert "(2, 3, 3)" in capsys.readouterr().out
    if page.name == "usage.md":
        assert "0.weight" in names["weights"]


WITH_EXAMPLES = [
    ".".join(file.relative_to(ROOT / "src").with_suffix("").parts)
    for file in sorted((ROOT / "src").rglob("*.py"))
    if ">>> " in file.read_text("utf-8")
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_docstrings_run(name):
    found = doctest.testmod(import_module(name))
    assert found.attempted > 0
    assert found.failed == 0


def test_a_method_fits_in_forty_lines():
    replay = blocks(ROOT / "docs" / "methods.md")[0]
    method = replay[replay.index("@dataclass") : replay.index("tasks = ")]
    assert "class Replay" in method
    assert len(method.splitlines()) < 40


@pytest.mark.parametrize(
    ("heading", "interface", "apart"),
    [
        ("The view", View, set()),
        ("What a method declares", Method, {"init", "update", "consolidate"}),
    ],
)
def test_a_table_has_all_members_of_an_interface(heading, interface, apart):
    text = (ROOT / "docs" / "methods.md").read_text("utf-8")
    table = text.split(f"### {heading}\n")[1].split("|\n\n")[0]
    cells = " ".join(re.findall(r"^\| (`.*?) \|", table, re.M))
    members = {*vars(interface), *vars(interface).get("__annotations__", {})}
    public = {name for name in members if not name.startswith("_")}
    assert set(re.findall(r"`(\w+)[`(]", cells)) == public - apart


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    text = page.read_text("utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith(("http:", "https:")):
            continue
        file, _, heading = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if heading:
            lines = re.findall(r"^#+ (.*)", target.read_text("utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines]
            assert heading in slugs, link


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_options_exist(page):
    fields = setting_fields()
    switches = [n for n, of in fields.items() if next(iter(of.values())).type in (bool, "bool")]
    known = {flag(name) for name in fields} | {f"--no-{flag(n)[2:]}" for n in switches}
    known |= set(OF_COMMANDS)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text("utf-8")))
    assert named <= known


def test_files_that_are_named_exist():
    rooms = ROOT / "src" / "forgetless"
    folders = (ROOT, rooms, *(rooms / room for room in ROOMS))
    for page in PAGES:
        for name in re.findall(r"`([\w./]+/[\w./]*|\w+\.py)`", page.read_text("utf-8")):
            if name.startswith(("runs/", "checkpoint/")):
                continue
            assert any((folder / name).exists() for folder in folders), f"{page.name}: {name}"


def test_the_readme_has_all_rooms_in_the_order_of_their_imports():
    table = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert table == list(ROOMS)


def test_the_example_of_a_comparison_is_the_one_that_was_recorded():
    text = (ROOT / "docs" / "comparisons.md").read_text("utf-8")
    search = load_search(ROOT / "results" / "comparison" / "rotated-digits.json")
    for method, choice in search.best.items():
        cells = (method_label(method), described(choice.settings), f"{choice.score:.2f}")
        assert f"| {' | '.join(cells)} | {choice.trials} |" in text
    with (ROOT / "results" / "comparison" / "rotated-digits.csv").open() as file:
        for row in csv.DictReader(file):
            numbers = {n: float(v) for n, v in row.items() if n.startswith(("average", "forget"))}
            accuracy, forgot = (
                f"{numbers[n]:.2f} ± {numbers[f'{n}_interval']:.2f}"
                for n in ("average_accuracy", "forgetting")
            )
            change = f"{float(row['difference']):.2f}" if row["difference"] else ""
            assert f"| {row['method']} | {accuracy} | {forgot} | {change}".rstrip() in text
            assert f"| {format_bytes(int(row['bytes']))} | {float(row['seconds']):.1f} |" in text
            assert not row["p"] or float(row["p"]) < 0.001


def test_a_guards_step_is_said_to_take_what_was_measured():
    cases = json.loads((ROOT / "results/bench/large.json").read_text("utf-8"))["cases"]
    text = " ".join((ROOT / "docs/scale.md").read_text("utf-8").split())
    for protected, storage, words, digits in (
        (
            "all weights",
            "dense",
            r"took ([\d.]+) to ([\d.]+) times the estimate with all weights",
            2,
        ),
        ("all weights", "bfloat16", r"([\d.]+) to ([\d.]+) times in bfloat16", 2),
        ("adapters", "dense", r"([\d.]+) to ([\d.]+) times with adapters", 1),
    ):
        times = [
            case["times_floor"]
            for case in cases
            if (case["protected"], case["storage"]) == (protected, storage)
        ]
        found = re.search(words, text)
        assert found is not None
        assert found.groups() == (f"{min(times):.{digits}f}", f"{max(times):.{digits}f}")


def test_the_reference_has_all_public_names():
    text = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    wholes = re.findall(r"automodule:: (\S+)\n   :members:", text)
    named = {path.rpartition(".")[2] for path in re.findall(r"auto\w+:: (\S+)", text)}
    named |= {name for package in wholes for name in import_module(package).__all__}
    assert {"forgetless.theory", "forgetless.llm", "forgetless.report.plots"} < set(wholes)
    assert {*forgetless.__all__, *guard.__all__} - named == {"__version__"}
