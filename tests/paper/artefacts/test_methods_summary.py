"""The bytes of methods' memories."""

from dataclasses import replace

import pytest
import torch

from forgetless.paper.artefacts import (
    methods_summary,
)
from forgetless.paper.workshop import Workshop
from forgetless.subspace import Subspace


@pytest.mark.parametrize(("method", "storage"), methods_summary.KEPT)
def test_bytes_of_many_tasks_follow_from_three(tiny, tmp_path, method, storage):
    settings = {**tiny.benchmarks["rotated"].settings, "tasks": 7}
    benchmark = replace(tiny.benchmarks["rotated"], settings=settings)
    workshop = Workshop(replace(tiny, benchmarks={"rotated": benchmark}), tmp_path, None, "cpu", {})
    config = workshop.scale.config("rotated", method, seeds="1", storage=storage)
    replay = workshop.untrained(config)
    for task in range(6):
        replay.remember(task)
    found = methods_summary.kept_bytes(workshop, "rotated", method, storage)
    assert found == replay.kept_bytes()
    state = replay.learner.state
    if method == "gem-nt":  # a replay holds its samples itself, as many as A-GEM's
        assert found == methods_summary.kept_bytes(workshop, "rotated", "a-gem", storage)
    elif isinstance(state, Subspace):
        assert found == state.nbytes
    else:
        tensors = [t for t in getattr(state, "__dict__", {}).values() if torch.is_tensor(t)]
        assert found == sum(t.nbytes for t in tensors)


def test_rows_in_bfloat16_take_half_the_bytes(tiny, workshop):
    half, whole = (
        methods_summary.kept_bytes(workshop, "rotated", "pca-ogd", storage)
        for storage in ("bfloat16", "dense")
    )
    moments = 8 * tiny.memory**2
    assert half - moments == (whole - moments) / 2
