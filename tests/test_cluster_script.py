"""The simulated makespan of scripts/cluster.py."""

from hypothesis import given
from hypothesis import strategies as st
from scripts.cluster import makespan

SECONDS = st.lists(st.floats(0.1, 100), min_size=1, max_size=40)


@given(SECONDS, st.integers(1, 20))
def test_it_is_within_grahams_bounds(seconds, workers):
    least = max(sum(seconds) / workers, max(seconds))
    found = makespan(seconds, workers)
    assert least * (1 - 1e-9) <= found <= sum(seconds) / workers + max(seconds) + 1e-9
    if workers == 1:
        assert abs(found - sum(seconds)) < 1e-6


def test_each_job_goes_to_the_worker_that_is_free_first():
    assert makespan([3, 3, 2, 2, 2], 2) == 7
    assert makespan([3, 3, 2, 2, 2], 16) == 3
