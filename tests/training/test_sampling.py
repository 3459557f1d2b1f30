"""Random choices of stored samples, drawn when asked for or ahead."""

import torch

from forgetless.support.streams import stream
from forgetless.training.sampling import Sampler, choose_indices


def test_choices_drawn_ahead_are_those_of_single_steps():
    def sampler() -> Sampler:
        return Sampler([stream(s, "test") for s in (0, 1)], torch.device("cpu"))

    def ask(some: Sampler) -> list[torch.Tensor]:
        return [some(3, 7), some(2, 5)]

    one_by_one, ahead = sampler(), sampler()
    expected = []
    for _ in range(4):
        with one_by_one.step():
            expected += ask(one_by_one)
    with ahead.step():
        found = ask(ahead)
    ahead.ahead(3)
    with ahead.step():
        found += ask(ahead)
    with ahead.handing_out(ahead.take(2)):
        found += ask(ahead) + ask(ahead)
    assert all(map(torch.equal, found, expected))
    first = choose_indices(3, 7, [stream(s, "test") for s in (0, 1)])
    assert torch.equal(found[0], first)
