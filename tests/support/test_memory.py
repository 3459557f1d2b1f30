"""How much memory there is."""

import torch

from forgetless.support.memory import free_memory, total_memory


def test_there_is_memory_and_not_all_of_it_is_free():
    cpu = torch.device("cpu")
    assert 1 << 20 < free_memory(cpu) < total_memory(cpu) < 1 << 60
