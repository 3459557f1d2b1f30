"""What each of several processes does in a test, as `torchrun` would have started it."""

import os

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard

from forgetless import PCAOGD
from forgetless.guard.frameworks.base import GuardCarrier
from tests.guard.frameworks.common import leak, network, points, vector

METHOD = PCAOGD(components=10, samples=48)  # all samples that there are


def as_by_torchrun(rank: int) -> None:
    """The environment that frameworks read; the processes are connected already."""
    size = dist.get_world_size()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "test",
    }


def assert_same_everywhere(tensor: torch.Tensor) -> None:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor)
    for other in every:
        assert torch.equal(other, tensor)


def with_transformers(folder, size):
    """A model, its guard's callback, and the training of task 0 or 1."""
    from forgetless.guard.frameworks.transformers import GuardTrainerCallback
    from tests.guard.frameworks.test_transformers import llama, tokens, train

    rows = torch.stack([row["labels"] for row in tokens(0)])
    protect = [{"input_ids": rows, "labels": rows}]
    model, callback = llama(), GuardTrainerCallback(METHOD, protect=protect)
    settings = {"per_device_train_batch_size": 4 // size, "optim": "sgd", "learning_rate": 0.5}

    def learn(number: int) -> None:
        train(model, tokens(number), folder / str(number), callback, **settings)
        file = load_file(folder / str(number) / "forgetless.safetensors")
        stored = callback.guard.state_dict()["memory.directions"]
        assert torch.equal(file["memory.directions"], stored)

    return model, callback, learn


def with_lightning(folder, size):
    """A module, its guard's callback, and the training of task 0 or 1."""
    import lightning
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from forgetless.guard.frameworks.lightning import GuardCallback
    from tests.guard.frameworks.test_lightning import SETTINGS, Classifier

    model, callback = Classifier(), GuardCallback(METHOD, protect=points(0))
    # The samplers that Lightning puts in shuffle.
    ddp = {"strategy": "ddp", "devices": size, "use_distributed_sampler": False}
    settings = {"max_epochs": 2, "callbacks": [callback], **SETTINGS, **(ddp if size > 1 else {})}

    def learn(number: int) -> None:
        data = TensorDataset(*points(2.0 * number))
        sampler = DistributedSampler(data, shuffle=False) if size > 1 else None
        loader = DataLoader(data, batch_size=8 // size, sampler=sampler)
        lightning.Trainer(**settings).fit(model, loader)

    return model, callback, learn


FRAMEWORKS = {"transformers": with_transformers, "lightning": with_lightning}


def two_tasks_each(rank, folder) -> None:
    """Train two tasks with each framework, and store one of a sharded model."""
    if dist.is_initialized():
        as_by_torchrun(rank)
    for name, framework in FRAMEWORKS.items():
        two_tasks(rank, folder / name, framework)
    sharded_file(rank, folder)


def sharded_file(rank, folder) -> None:
    """What a callback writes of a sharded model, which the processes store in parts."""
    model = network()
    if dist.is_initialized():
        model = fully_shard(model)
    carrier = GuardCarrier(METHOD, {})
    carrier._attach(model, torch.optim.SGD(model.parameters()))
    carrier.end_task(points(0))
    carrier.save(folder / "sharded")


def two_tasks(rank, folder, framework) -> None:
    """Train two tasks; the first process leaves the weights after each in the folder."""
    together = dist.is_initialized()
    model, callback, learn = framework(folder, dist.get_world_size() if together else 1)
    learn(0)
    guard = callback.guard
    assert guard.tasks == 2  # what was protected at first, and the task
    directions = guard.state_dict()["memory.directions"]
    before = vector(model, guard.names)
    learn(1)
    after = vector(model, guard.names)
    assert leak(guard, before, after, directions) < 1e-5
    assert guard.tasks == 3
    if together:
        assert_same_everywhere(after)
        assert_same_everywhere(guard.state_dict()["memory.directions"])
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"before": before, "after": after}, folder / "found.safetensors")
