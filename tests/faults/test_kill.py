"""A run that is killed, whenever, and run again gives the trace of one that was not."""

import sys

import pytest

from .server import METHODS, killed_runs

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


def test_thirty_kills_at_random_moments_lose_nothing(tmp_path):
    """Every method, a checkpoint after every step, so that many blows fall while one is written."""
    found = killed_runs(tmp_path, kills=30, seed=2)
    assert found["killed"] == 30
    assert found["during_write"] > 0
    assert found["lost"] == {}


def test_every_method_is_killed():
    from forgetless.methods import METHODS as KNOWN

    assert set(METHODS) == set(KNOWN)
