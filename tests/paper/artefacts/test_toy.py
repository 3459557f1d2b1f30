"""The worst-case toy."""

import torch

from forgetless.paper.artefacts import toy
from forgetless.theory import SampleProjection, learn


def test_all_directions_are_taken_when_the_last_of_them_is():
    (line, _) = toy._full({f"500 {p}": {} for p in (200, 215, 500)})
    assert line.endswith("p = 200 after task 8, p = 215 after task 9.")


def test_many_few_steps_reach_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cpu")
    tasks = [toy._task(40, 10, generator, device)[0] for _ in range(2)]
    kept = SampleProjection(4)
    descended = learn(tasks, kept, solver=toy._FewSteps(3000)).weights
    torch.testing.assert_close(descended, learn(tasks, kept).weights)
