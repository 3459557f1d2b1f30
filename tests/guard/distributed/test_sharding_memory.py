"""What storing a task of a sharded model takes: a layer at a time, or all weights at once."""

import ctypes
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from forgetless import PCAOGD, Guard, KronOGD

from .worlds import world

WIDTH, LAYERS = 512, 60
LAYER = 4 * WIDTH**2  # bytes
METHODS = {
    "kron-ogd": KronOGD(energy=0.9, samples=8),
    "pca-ogd": PCAOGD(components=2, samples=4),
}


def deep_network() -> nn.Module:
    """Of which this process has its share alone, from the beginning."""
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        model = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0, WIDTH**-0.5)
    return model


def resident(line: str) -> int:
    """Bytes of memory now (VmRSS) or at their peak (VmHWM)."""
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith(f"{line}:"):
            return 1024 * int(row.split()[1])
    raise AssertionError(line)


def peak(act) -> int:
    """Bytes of memory at the peak of a call, above those before it."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    act()
    return resident("VmHWM") - before


def measured(rank, folder, names):
    """Each method's peak, and that of a training step."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is gone at once
    found = {}
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    y = torch.arange(8) % 4
    for name in names:
        model = deep_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        guard = Guard(model, optimizer, METHODS[name], params="0", drift_samples=2)

        def step(model=model, optimizer=optimizer):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        found["step"] = peak(step)
        found[name] = peak(lambda guard=guard: guard.end_task((x, y)))
        guard.remove()
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of processes as Linux has it")
@pytest.mark.parametrize(("size", "names"), [(2, ["kron-ogd", "pca-ogd"]), (4, ["kron-ogd"])])
def test_storing_a_task_of_a_large_model_takes_no_more_than_some_layers(size, names, tmp_path):
    world(size, tmp_path, measured, names)
    for rank in range(size):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        # Beside a step's gathered layers and gradients: the protected layer's moments, in float64
        # with room to work, a dozen megabytes; all weights would be sixty.
        assert found["kron-ogd"] < found["step"] + LAYERS * LAYER / 2, found
        if "pca-ogd" in names:  # the gradients of single samples need all weights
            assert found["pca-ogd"] > LAYERS * LAYER, found
