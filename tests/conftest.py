"""What the tests share: small real data, and the folder with the large datasets."""

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from forgetless import Scenario, TensorScenario, scenario
from forgetless.cli import main

# Deadlines would make slow machines fail; examples are few because each trains or factorises.
settings.register_profile("forgetless", deadline=None, max_examples=50)
settings.load_profile("forgetless")
# The tests run in several processes; one thread each keeps them from fighting over cores.
torch.set_num_threads(1)
# In the background a shell lets Ctrl-C be ignored, by the tests and by all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with MNIST and CIFAR-100, or a skip that says what is missing."""
    folder = os.environ.get("FORGETLESS_DATA")
    if not folder:
        pytest.skip("needs MNIST and CIFAR-100: set FORGETLESS_DATA to a folder that has them")
    return Path(folder)


@pytest.fixture(scope="session")
def digits() -> Scenario:
    """Three tasks of rotated digits, few images each."""
    return scenario("rotated-digits", tasks=3, train_per_class=20, step_degrees=30)


@pytest.fixture(scope="session")
def split_digits() -> Scenario:
    """Three tasks with two digits and a head each."""
    return scenario("split-digits", tasks=3, train_per_class=20)


def forgetless(arguments, capsys):
    """Exit status, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as stopped:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return stopped.value.code, out, err


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Work in an empty folder, so that default folders are looked at too."""
    monkeypatch.chdir(tmp_path)


def blobs(tasks: int = 2, n: int = 24, size: int = 6, classes: int = 3, seed: int = 0) -> Scenario:
    """Clouds of points, another arrangement in each task."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(tasks):
        centres = 2 * torch.randn(classes, size, generator=generator)
        labels = torch.arange(2 * n) % classes
        inputs = centres[labels] + torch.randn(2 * n, size, generator=generator)
        pairs.append(((inputs[:n], labels[:n]), (inputs[n:], labels[n:])))
    return TensorScenario(pairs, name="blobs")
