"""What is imported before a command needs it."""

import subprocess
import sys

import pytest

import forgetless

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
