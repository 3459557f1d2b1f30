"""Objects by the file or module that defines them, and back."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from forgetless import ConfigError
from forgetless.support.plugins import AS_GIVEN, code_of, import_path, load_object

SCRIPT = """
import helper
from dataclasses import dataclass

@dataclass
class Thing:
    size: int = helper.SIZE

def make():
    return Thing(3)

if __name__ == "__main__":
    raise SystemExit
"""


def test_a_file_and_a_module_are_loaded_and_found_again(tmp_path):
    (tmp_path / "helper.py").write_text("SIZE = 2")
    (tmp_path / "mine.py").write_text(SCRIPT)
    make = load_object(f"{tmp_path}/mine.py:make", "--from")
    assert make().size == 3
    assert load_object(f"{tmp_path}/mine.py:Thing", "--from")().size == 2
    assert isinstance(make(), load_object(f"{tmp_path}/mine.py:Thing", "--from"))
    assert import_path(make) == "mine:make"
    assert load_object("torch.nn:Linear", "--from") is nn.Linear
    assert import_path(load_object("tests.conftest:blobs", "--from")) == "tests.conftest:blobs"


def test_what_has_no_name_is_as_given():
    def inner():
        return None

    assert {import_path(x) for x in (lambda: 1, inner, nn.Linear(1, 1))} == {AS_GIVEN}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine.py", "--from must be FILE:NAME, such as script.py:make, not 'mine.py'"),
        ("nowhere.py:make", "nowhere.py is not a file"),
        ("no.such.module:make", "no.such.module cannot be imported: No module named 'no'"),
        ("{}/broken.py:make", "broken.py cannot be executed: ZeroDivisionError: division by zero"),
        ("torch.nn:Lineer", "torch.nn has no Lineer"),
    ],
)
def test_what_cannot_be_loaded_is_said(text, message, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        load_object(text.format(tmp_path), "--from")


def test_code_is_without_comments_and_empty_for_this_package():
    def one(x):
        return x + 1  # a comment

    first = code_of(one)

    def one(x):
        # another one

        return x + 1

    assert code_of(one) == first != ""
    assert code_of(nn.Linear) == code_of(ConfigError) == ""

    def times(factor):
        return lambda x: factor * x

    assert code_of(times(2)) == code_of(times(2)) != code_of(times(3))
    assert code_of(partial(times, 2)) == code_of(partial(times, 2)) != code_of(partial(times, 3))

    def of(layer):
        return lambda: layer

    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    assert code_of(of(one)) == code_of(of(one)) != code_of(of(two))
    assert code_of(of(nn.Linear)) == code_of(of(nn.Linear)) != code_of(of(nn.Conv2d))
    assert code_of(of(torch.optim.SGD(one.parameters())))

    def again(x):
        return again(x - 1) if x else 0

    assert code_of(again)
    double, triple = (lambda x: 2 * x), (lambda x: 3 * x)
    assert code_of(double) != code_of(triple)


def test_a_folder_may_have_any_name(tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"n\xffd")
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("mine.py").write_text("def make(): return 3")
    assert load_object("mine.py:make", "--from")() == 3
