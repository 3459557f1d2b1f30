"""A few hundred spoiled files for every reader; scripts/fuzz.py feeds them a hundred thousand."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .problems import Plug
from .readers import _Runs, all_readers, inputs

NAMES = (
    "IDX", "IDX, gzipped", "CIFAR-100, binary", "CIFAR-100, Python", "CIFAR-10, Python",
    "trace, record",
    "trace, weights", "checkpoint, manifest", "checkpoint, progress", "checkpoint, memory",
    "guard state, ogd, dense", "guard state, ogd, factored", "guard state, pca-ogd, bfloat16",
    "guard state, ewc, dense", "guard state, a-gem, dense", "guard state, joint, dense",
    "guard, file of a callback", "shared storage, pointer",
    "guard state, gpm, dense", "guard state, kron-ogd, dense", "guard state, kfac-laplace, dense",
    "guard state, kron-ewc, dense", "features", "search",
)  # fmt: skip


@pytest.fixture(scope="module")
def readers():
    with pytest.MonkeyPatch.context() as patch, all_readers(Plug(patch)) as found:
        yield found


def test_no_reader_is_left_out(readers):
    assert set(readers) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_only_clean_refusals(name, readers):
    reader = readers[name]
    assert reader.survives(reader.sound)
    refused = []

    @settings(max_examples=150, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def feed(data):
        refused.append(not reader.survives(data.draw(inputs(reader))))

    feed()
    assert any(refused)
    assert _Runs.count == 0


def test_a_guards_state_with_absurd_numbers_is_refused(readers):
    """Found by fuzzing: a number of tasks that a report would have counted up to for days."""
    import json

    import torch
    from safetensors.torch import load, save

    for name in ("guard state, ewc, dense", "guard state, ogd, dense"):
        tensors = load(readers[name].sound)
        header = json.loads(bytes(tensors["header"].tolist())) | {"tasks": 2**40}
        text = bytearray(json.dumps(header).encode())
        tensors["header"] = torch.frombuffer(text, dtype=torch.uint8)
        assert not readers[name].survives(save(tensors))
        tensors = load(readers[name].sound)
        assert not readers[name].survives(save(tensors | {"generators": tensors["generators"][:1]}))
