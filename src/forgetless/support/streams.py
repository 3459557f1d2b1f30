"""Random numbers: an independent stream for each seed and purpose, none of them global."""

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def stream(seed: int, purpose: str, index: int = 0) -> torch.Generator:
    """A CPU generator determined by these three arguments, the same on every machine."""
    return torch.Generator().manual_seed(_state(seed, purpose, index))


def random_subset(count: int, available: int, generator: torch.Generator) -> torch.Tensor:
    """Random indices without replacement, (min(count, available),), all choices equally likely.

    Few among many are drawn until all differ, which seldom takes a second draw; shuffling all of
    them would take longer than a training step.
    """
    while count**2 <= available:
        drawn = torch.randint(available, (count,), generator=generator)
        if len(set(drawn.tolist())) == count:
            return drawn
    return torch.randperm(available, generator=generator)[:count]


@contextmanager
def global_stream(seed: int, purpose: str) -> Iterator[None]:
    """Seed torch's global generators in the block and restore them after it.

    For code that takes no generator: weight initialisation and dropout.
    """
    with torch.random.fork_rng():
        torch.manual_seed(_state(seed, purpose, 0))
        yield


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python in the block, restore them after it.

    For a user's code that may draw from any of them, where nothing else may notice.

    Arguments:
        device: besides the CPU, the device whose generator may be used.
    """
    gpu = [device] if device.type == "cuda" else []
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(gpu):
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002
            torch.default_generator.manual_seed(0)
            if gpu:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _state(seed: int, purpose: str, index: int) -> int:
    entropy = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), index])
    return int(entropy.generate_state(1, np.uint64)[0] >> np.uint64(1))
