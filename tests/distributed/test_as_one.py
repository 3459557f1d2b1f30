"""Several processes train to the weights that one process trains to."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from .cases import CASES, plain, trained, weights
from .worlds import world


def _battery(rank, folder):
    for case in CASES:
        model, _, guard = trained(case, alone=False)
        found = weights(model)
        everyone = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, found)
        stats = guard.stats()  # a sum over the processes: all of them ask
        if rank == 0:
            kept = {
                "weights": found,
                "alike": torch.tensor([torch.equal(one, found) for one in everyone]),
                "directions": torch.tensor(guard.memory_report().directions),
                "removed": torch.tensor([stats.removed, *stats.layers.values()]).double(),
            }
            save_file(kept, folder / f"{case.name}.safetensors")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    world(2, folder, _battery)
    return folder


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    world(4, folder, _battery)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("size", [2, 4])
def test_weights_are_those_of_one_process(case, size, request):
    found = load_file(
        request.getfixturevalue({2: "of_two", 4: "of_four"}[size]) / f"{case.name}.safetensors"
    )
    assert bool(found["alike"].all())
    model, _, guard = trained(case, alone=True)
    expected = weights(model)
    tolerance = 1e-11 if case.dtype == torch.float64 else 1e-6
    assert float((found["weights"] - expected).abs().max()) <= tolerance
    # What is compared is not what training without a guard gives.
    assert float((plain(case) - expected).abs().max()) > 1e-3
    assert int(found["directions"]) == guard.memory_report().directions
    stats = guard.stats()
    removed = torch.tensor([stats.removed, *stats.layers.values()]).double()
    torch.testing.assert_close(found["removed"], removed, atol=1e-5, rtol=1e-4)
