"""The command without a subcommand, its help, and what is imported before a command needs it."""

import os
import subprocess
import sys

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


def test_without_arguments_it_says_what_it_can_do(capsys):
    status, out, _ = command([], capsys)
    assert status == 0
    assert "compare" in out


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
