"""Two and four processes do what one does, and read what the others wrote."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from .cases import CASES, plain, trained, weights
from .works import CONTINUED, continued, everything, first_half, second_half
from .worlds import world

# What four processes run as well; two run all.
OF_FOUR = ["ddp-kron", "ddp-pca-32", "fsdp-kron", "fsdp-ogd", "fsdp-pca", "fsdp-pca-32"]


def as_one(case, found) -> None:
    """The weights are those of one process, and not those of training without a guard."""
    model, _, guard = trained(case, alone=True)
    expected = weights(model)
    tolerance = 1e-12 if case.dtype == torch.float64 else 1e-6
    assert float((found["weights"] - expected).abs().max()) <= tolerance, case.name
    assert float((plain(case) - expected).abs().max()) > 1e-3
    assert int(found["directions"]) == guard.memory_report().directions
    stats = guard.stats()
    removed = torch.tensor([stats.removed, *stats.layers.values()]).double()
    torch.testing.assert_close(found["removed"], removed, atol=1e-5, rtol=1e-4)
    drift = torch.tensor(list(guard.drift().metrics().values())).double()
    assert len(drift) == 9  # of each task: drift, share of changed predictions, loss
    torch.testing.assert_close(found["drift"], drift, atol=1e-6, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:the protected directions leave no room")  # of tiny networks
def test_one_two_four_and_one_again(tmp_path):
    """Checkpoints go from one process to two, from two to four, and from four to one."""
    one, two, four = (tmp_path / name for name in ("one", "two", "four"))
    for case in CONTINUED:
        model, guard = first_half(case, alone=True, save=one / case.name)
        half = weights(model)
        kept = {"half": half, "end": second_half(case, model, guard, alone=True)}
        for folder in (one, two, four):
            folder.mkdir(exist_ok=True)
            save_file(kept, folder / f"{case.name}.safetensors")
    for size, names, before, after in (
        (2, [case.name for case in CASES], one, two),
        (4, OF_FOUR, two, four),
    ):
        folder = tmp_path / f"world-{size}"
        world(size, folder, everything, names, before, after)
        for case in CASES:
            if case.name in names:
                as_one(case, load_file(folder / f"{case.name}.safetensors"))
    for case in CONTINUED:
        kept = load_file(four / f"{case.name}.safetensors")
        _, found = continued(case, four / case.name, kept["half"], alone=True)
        assert float((found - kept["end"]).abs().max()) <= 1e-11, case.name
