"""The command without a subcommand, its help, and what is imported before a command needs it."""

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import forgetless
from tests.conftest import forgetless as command

HEAVY = ("torch", "numpy", "scipy", "sklearn", "matplotlib")


def loaded(program: str) -> set[str]:
    """The heavy packages that a program has imported when it ends."""
    tell = f"print('loaded', *(m for m in {HEAVY} if m in __import__('sys').modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"import atexit; atexit.register(lambda: {tell})\n{program}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("loaded")]
    return set(line.split()[1:])


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"], []])
def test_the_command_explains_itself_without_torch(arguments):
    assert loaded(f"from forgetless.cli import main; main({arguments})") == set()


def test_the_package_is_imported_without_torch():
    assert loaded("import forgetless; forgetless.__version__; dir(forgetless)") == set()
    assert loaded("from forgetless import ConfigError") == set()
    assert "torch" in loaded("from forgetless import fit")


def test_every_public_name_is_there():
    assert set(forgetless.__all__) <= set(dir(forgetless))
    everything: dict[str, object] = {}
    exec("from forgetless import *", everything)
    assert set(forgetless.__all__) <= set(everything)
    assert set(forgetless._HOMES) | {"__version__"} == set(forgetless.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Gard'"):
        _ = forgetless.Gard


def test_the_help_lists_every_command_with_its_own_first_line(capsys):
    import typer

    from forgetless.cli.main import _COMMANDS, app

    group = typer.main.get_command(app)
    for name, (_, _, line) in _COMMANDS.items():
        command = group.get_command(None, name)
        assert command is not None
        assert line[:-1].split()[0] == command.help.split()[0]


@pytest.mark.parametrize("name", [[], ["run"], ["compare"], ["list"], ["data"], ["data", "fetch"]])
def test_help_is_help(name, capsys):
    status, out, err = command([*name, "--help"], capsys)
    assert status == 0
    assert "Usage: forgetless" in out
    assert err == ""


def test_without_arguments_it_says_what_to_do_next(capsys):
    status, out, err = command([], capsys)
    assert (status, err) == (0, "")
    for word in ("Guard(model", "guard.end_task(", "compare rotated-digits", "doctor", "--help"):
        assert word in out
    root = Path(forgetless.__file__).parents[2]
    named = re.findall(r"docs/\w+\.md", out)
    assert len(named) == 4
    assert all((root / page).exists() for page in named)
    assert len(out.splitlines()) < 20
    assert max(map(len, out.splitlines())) < 92


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["comapre"], "unknown command 'comapre': did you mean 'compare'? There are list, run,"),
        (["data", "fetsh"], "unknown command 'fetsh': did you mean 'fetch'?"),
        (["paper", "bild", "all"], "unknown command 'bild': did you mean 'build'?"),
        (["--verison"], "unknown option '--verison': did you mean '--version'?"),
        (["run", "x", "--epoch", "3"], "unknown option '--epoch': did you mean '--epochs'?"),
        (["run", "x", "--zzzz"], "unknown option '--zzzz'; --help shows all"),
        (["data", "fetch", "minst"], "unknown dataset 'minst': did you mean 'mnist'?"),
        (["paper", "build", "tabel1"], "unknown artefact 'tabel1': did you mean 'table1'?"),
        (["paper", "build", "all", "--scale", "smal"], "not 'smal': did you mean 'small'?"),
        (["compare", "rotated-digits", "--engine", "rya"], "not 'rya': did you mean 'ray'?"),
        (
            ["run", "rotated-digits", "--method", "sgd", "--log", "wandb,tensorbord"],
            "not 'tensorbord': did you mean 'tensorboard'?",
        ),
        (
            ["run", "rotated-digits", "--method", "sgd", "--keep", "weight"],
            "not 'weight': did you mean 'weights'?",
        ),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_a_wrong_name_is_one_sentence_with_the_nearest(words, message, capsys):
    status, out, err = command(words, capsys)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("forgetless: ")
    assert len(err.splitlines()) == 1


COLOUR = re.compile(rb"\x1b\[[0-9;]*m")


THRICE = """
import os, sys
from forgetless.cli import main
words = "compare rotated-digits --methods sgd,ewc --tasks 2 --epochs 1 --no-analyse --overwrite"
for changed in ({}, {"NO_COLOR": "1"}, {"TERM": "dumb"}):
    os.environ.update(changed)
    try:
        main([*words.split(), "--out", sys.argv[1]])
    except SystemExit as ended:
        assert not ended.code
    print("=====", flush=True)
"""


def test_no_colour_where_none_is_wanted(tmp_path):
    """On a terminal; NO_COLOR leaves bold type, a dumb terminal has not even that."""
    ours, theirs = pty.openpty()
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-c", THRICE, str(tmp_path)],
        stdout=theirs, stderr=theirs, env=clean | {"TERM": "xterm"},
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # Linux says so at the end of a terminal
            while more := os.read(ours, 4096):
                shown += more
    os.close(ours)
    assert process.returncode == 0
    parts = shown.split(b"=====")[:3]
    codes = [{int(n) for c in COLOUR.findall(p) for n in c[2:-1].split(b";") if n} for p in parts]
    has_colour = [any(30 <= n <= 49 or n >= 90 for n in found) for found in codes]
    assert has_colour == [True, False, False]
    assert [bool(found) for found in codes] == [True, True, False]


def test_version(capsys):
    from forgetless import __version__

    assert command(["--version"], capsys)[:2] == (0, f"{__version__}\n")


@pytest.mark.parametrize("words", [["list"], ["run", "--help"]])
def test_a_reader_that_has_seen_enough_is_no_failure(words):
    """`forgetless list | head -1`: the convention of shells, and nothing on standard error."""
    command = [sys.executable, "-m", "forgetless", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize(
    "words", [["run", "rotated-digits", "--method", "sgd", "--out"], ["report"], ["forecast"]]
)
def test_a_name_that_is_not_utf8_is_one_sentence(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    odd = os.fsdecode(b"caf\xe9")
    status, out, err = command([*words, odd], capsys)
    assert (status, out) == (2, "")
    assert err == "forgetless: caf\\xe9 is not valid UTF-8; rename the file or folder\n"
    assert not list(tmp_path.iterdir())
    assert command(["report", "café"], capsys)[2].startswith("forgetless: café holds no trace")


@pytest.mark.parametrize(("closed", "status"), [("stdout", 0), ("stderr", 2)])
def test_a_closed_stream_is_no_failure(closed, status):
    words = ["--version"] if closed == "stdout" else ["list", "nothing"]
    command = [sys.executable, "-m", "forgetless", *words]
    number = {"stdout": 1, "stderr": 2}[closed]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {number}>&-', "sh", *command], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, b"", b"")
