"""Short runs on digits, with their weights and memory."""

import pytest

from forgetless.launch.config import resolve
from forgetless.launch.runs import run

SETTINGS = {"tasks": 3, "epochs": 3, "train_per_class": 15, "memory": 10, "hidden": 20}


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """A function from a scenario and a method to the trace of a short run, each made once."""
    made = {}

    def trace(scenario: str, method: str, **more):
        key = scenario, method, tuple(sorted(more.items()))
        if key not in made:
            config = resolve(scenario, method, device="cpu", **SETTINGS | {"samples": 60} | more)
            made[key] = run(config, out=tmp_path_factory.mktemp("runs") / method)
        return made[key]

    return trace
