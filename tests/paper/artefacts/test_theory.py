"""The checks of the theory."""

import torch

from forgetless.paper.artefacts import (
    theory,
)


def test_small_networks_are_drawn_the_same_and_leave_the_global_generator_alone():
    found = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            found.append(theory.one_sample())
            assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]
