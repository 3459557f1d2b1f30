"""A scale so small that a run takes no time."""

from dataclasses import replace

import pytest

from forgetless.paper.benchmarks import SMALL
from forgetless.paper.workshop import Workshop


@pytest.fixture
def tiny():
    """Rotated digits, so small that a run takes no time."""
    settings = {"train_per_class": 8, "epochs": 1, "samples": 40, "tasks": 2, "hidden": 8}
    benchmark = replace(SMALL.benchmarks["rotated"], settings=settings)
    return replace(SMALL, benchmarks={"rotated": benchmark}, memory=4)


@pytest.fixture
def workshop(tiny, tmp_path):
    return Workshop(tiny, tmp_path, None, "cpu", {})
