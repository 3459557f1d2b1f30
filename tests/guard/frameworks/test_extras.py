"""An integration whose library is missing says which extra has it."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("lightning", "lightning.pytorch"),
        ("transformers", "transformers"),
        ("avalanche", "avalanche.models"),
    ],
)
def test_names_the_extra(monkeypatch, name, library):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"forgetless.guard.frameworks.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"forgetless\[{name}\]"):
        importlib.import_module(f"forgetless.guard.frameworks.{name}")
