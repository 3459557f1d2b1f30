"""What the processes of a test do; an assertion that fails in one of them fails the test."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from forgetless import AGEM, EWC, OGD, PCAOGD, ConfigError, DataError, Guard
from forgetless.guard.distributed.checkpoint import load_guard, save_guard
from tests.methods.test_ogd import Freeze
from tests.methods.test_own_methods import own

from .cases import CASES, OPTIMIZERS, loader, shared, started, steps, task, trained, weights

BY_NAME = {case.name: case for case in CASES}
CONTINUED_NAMES = (
    "fsdp-pca", "fsdp-kron", "fsdp-kron-ewc", "fsdp-ewc", "fsdp-si", "ddp-factored", "ddp-si",
)  # fmt: skip
CONTINUED = [BY_NAME[name] for name in CONTINUED_NAMES]


def all_cases(rank, folder, names):
    """Every case from beginning to end; what the first process found is left in the folder."""
    for case in (BY_NAME[name] for name in names):
        model, _, guard = trained(case, alone=False)
        found = weights(model)
        everyone = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, found)
        for other in everyone:
            assert torch.equal(other, found), case.name
        stats = guard.stats()  # a sum over the processes: all of them ask
        drift = guard.drift()  # gathers weights that are sharded
        if rank == 0:
            kept = {
                "weights": found,
                "directions": torch.tensor(guard.memory_report().directions),
                "removed": torch.tensor([stats.removed, *stats.layers.values()]).double(),
                "drift": torch.tensor(list(drift.metrics().values())).double(),
            }
            save_file(kept, folder / f"{case.name}.safetensors")


def first_half(case, *, alone, save=None):
    """Two tasks learned: model, guard."""
    model, optimizer, guard = started(case, alone)
    for number in (0, 1):
        steps(case, model, optimizer, number, 3, alone=alone)
        guard.end_task(loader(case, number, alone=alone))
    if save is not None:
        save_guard(guard, save)
    return model, guard


def second_half(case, model, guard, *, alone):
    """One more, with an optimizer that knows nothing of the first two: the weights."""
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    guard.attach(optimizer)
    steps(case, model, optimizer, 2, 3, alone=alone)
    guard.end_task(loader(case, 2, alone=alone))
    steps(case, model, optimizer, 9, 3, alone=alone)
    return weights(model)


def set_weights(model, vector) -> None:
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            values = vector[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            values = values.to(parameter.dtype)
            if hasattr(parameter, "full_tensor"):
                values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
            parameter.copy_(values)


def continued(case, checkpoint, vector, *, alone):
    """Training that goes on from a checkpoint: the guard that was loaded, and the weights."""
    model, _, guard = started(case, alone)
    set_weights(model, vector)
    load_guard(guard, checkpoint)
    assert guard.tasks == 2
    return guard, second_half(case, model, guard, alone=alone)


def written_and_read(rank, folder, before, after):
    """Read what other processes wrote under `before`, go on, and write under `after`."""
    for case in CONTINUED:
        there = before / case.name
        vector = load_file(before / f"{case.name}.safetensors")["half"]
        guard, found = continued(case, there, vector, alone=False)
        expected = load_file(before / f"{case.name}.safetensors")["end"]
        assert float((found - expected).abs().max()) <= 1e-11, case.name
        load_guard(guard, there)
        save_guard(guard, after / case.name)
        save_guard(guard, after / case.name)  # over an older one
        assert not list(after.glob("*.writing")) + list(after.glob("*.before"))


class Counted:
    """Counts what is handed to the collectives that this project calls."""

    def __init__(self, monkeypatch):
        self.calls = []
        for name in ("all_reduce", "broadcast", "all_gather"):
            original = getattr(dist, name)

            def counted(tensor, *args, original=original, name=name, **kwargs):
                own = args[0] if name == "all_gather" else tensor
                self.calls.append((name, own.numel(), own.nbytes))
                return original(tensor, *args, **kwargs)

            monkeypatch.setattr(dist, name, counted)


def traffic(rank, folder):
    """A step of a sharded model sums one number a direction; one of a replicated model none."""
    for name in ("fsdp-ogd", "fsdp-pca-32", "fsdp-some", "ddp-ogd"):
        case = BY_NAME[name]
        model, optimizer, guard = trained(case, alone=False, tasks=(0, 1), count=1)
        x, y = task(case, 5).tensors
        nn.functional.cross_entropy(model(x), y).backward()
        rank_of_memory = guard.memory_report().directions
        before = guard.ranks.calls, guard.ranks.bytes
        with pytest.MonkeyPatch.context() as monkeypatch:
            counted = Counted(monkeypatch)
            optimizer.step()
        item = torch.empty(0, dtype=case.dtype).element_size()
        sums = [("all_reduce", rank_of_memory, rank_of_memory * item)]
        assert counted.calls == (sums if case.wrap == "fsdp" else []), (name, counted.calls)
        after = guard.ranks.calls, guard.ranks.bytes
        told = (len(counted.calls), sum(size for *_, size in counted.calls))
        assert (after[0] - before[0], after[1] - before[1]) == told


def any_loader(rank, folder):
    """Parts of a task on each process, the same on all, nothing on one: always all samples."""
    case, size = BY_NAME["ddp-ogd"], dist.get_world_size()
    data = task(case, 0)
    x, y = data.tensors
    mine = slice(rank, None, size)
    parts = {
        "part": [(x[mine], y[mine])],
        "part in an iterator": iter([(x[mine], y[mine])]),
        "the same batch": (x, y),
        "the same loader": DataLoader(data, batch_size=4, shuffle=True),
        "all on one": [(x, y)] if rank == 0 else [],
    }
    for method in (OGD(samples=100), EWC(fisher="released")):
        states = {}
        for name, part in parts.items():
            part = iter([(x[mine], y[mine])]) if "iterator" in name else part
            model = DistributedDataParallel(case.made())
            guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1), method)
            guard.end_task(part)
            state = guard.state_dict()
            if method.name == "ewc":
                states[name] = state["memory.fisher"]
                continue
            rows = state["memory.directions"]
            states[name] = rows.T @ rows  # the same span in any order of samples
        alone = case.made()
        with pytest.warns(UserWarning, match="there are several processes"):
            guard = Guard(alone, torch.optim.SGD(alone.parameters(), 0.1), method)
        guard.end_task((x, y))
        expected = guard.state_dict()
        if method.name == "ewc":
            expected = expected["memory.fisher"]
        else:
            expected = expected["memory.directions"].T @ expected["memory.directions"]
        for name, found in states.items():
            torch.testing.assert_close(found, expected, atol=1e-10, rtol=0, msg=name)
    _some_of_parts(rank, x, y)
    _refused(rank, x, y)


def _some_of_parts(rank, x, y):
    """Of parts of different sizes, as many samples as asked for, each once, on every process."""
    model = DistributedDataParallel(BY_NAME["ddp-ogd"].made())
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1), AGEM(memory=8))
    half = slice(0, 5) if rank == 0 else slice(5, None)
    guard.end_task([(x[half], y[half])])
    kept = guard.state_dict()["memory.0:arg0"]
    assert kept.shape == (8, 6)
    assert len({tuple(row) for row in kept.tolist()} & {tuple(row) for row in x.tolist()}) == 8
    both = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
    dist.all_gather(both, kept)
    assert all(torch.equal(one, kept) for one in both)


def _refused(rank, x, y):
    """What cannot be done is said by every process, and nobody is left waiting."""
    model = DistributedDataParallel(BY_NAME["ddp-ogd"].made())
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1), OGD())
    with pytest.raises(DataError, match="no samples"):
        guard.end_task([])
    with pytest.raises(DataError, match="rank 1: a batch"):
        guard.end_task([(x, y)] if rank == 0 else [(x, y, y)])
    assert guard.tasks == 0
    with pytest.warns(UserWarning, match="neither in DistributedDataParallel nor sharded"):
        Guard(model.module, torch.optim.SGD(model.parameters(), 0.1), OGD())
    with pytest.raises(ConfigError, match=r"der\+\+ uses the batch of every step.* one process"):
        Guard(model, torch.optim.SGD(model.parameters(), 0.1), own.DERPP())
    sharded = shared(BY_NAME["fsdp-ogd"])
    optimizer = torch.optim.SGD(sharded.parameters(), 0.1)
    with pytest.raises(ConfigError, match=r"a-gem takes gradients.*DistributedDataParallel"):
        Guard(sharded, optimizer, AGEM())
    with pytest.raises(ConfigError, match=r"owm may need all weights in one place.* separable = T"):
        Guard(sharded, optimizer, own.OWM())
    with pytest.raises(ConfigError, match="Axes needs all columns of a vector"):
        Guard(sharded, optimizer, Freeze()).end_task((x, y))
    with pytest.raises(ConfigError, match="'dense', 'bfloat16' or 'cpu' for a sharded model"):
        Guard(sharded, optimizer, OGD(), storage="factored")
    with pytest.raises(ConfigError, match="budget= is not for sharded models"):
        Guard(sharded, optimizer, PCAOGD(), budget="1MB")
    _layouts_refused()


def _layouts_refused():
    """Parameters that are cut in other ways, or only some of them."""
    partly = BY_NAME["fsdp-ogd"].made()
    fully_shard(partly, ignored_params={partly[4].bias})
    with pytest.raises(ConfigError, match=r"4\.bias is not sharded.*exclude="):
        Guard(partly, torch.optim.SGD(partly.parameters(), 0.1), OGD())
    Guard(partly, torch.optim.SGD(partly.parameters(), 0.1), OGD(), exclude=["4.bias"])
    copies = BY_NAME["fsdp-ogd"].made()
    names = ("copies", "shards")
    fully_shard(copies, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=names))
    with pytest.raises(ConfigError, match="on a mesh of 2 dimensions"):
        Guard(copies, torch.optim.SGD(copies.parameters(), 0.1), OGD())
    for kind in ("FullyShardedDataParallel", "DeepSpeedEngine"):
        other = type(kind, (nn.Sequential,), {})(nn.Linear(2, 2))
        with pytest.raises(ConfigError, match=rf"{kind} .*shard the model with .*fully_shard"):
            Guard(other, torch.optim.SGD(other.parameters(), 0.1), OGD())
    apart = nn.Linear(2, 2)
    apart.weight.ds_tensor = torch.zeros(2)  # as ZeRO-3 marks its parameters
    with pytest.raises(ConfigError, match="ZeRO-3 has taken apart"):
        Guard(apart, torch.optim.SGD(apart.parameters(), 0.1), OGD())


def everything(rank, folder, names, before, after):
    """All of the above, in one world: processes take longer to start than to work."""
    all_cases(rank, folder, names)
    written_and_read(rank, folder, before, after)
    if dist.get_world_size() == 2:
        traffic(rank, folder)
        any_loader(rank, folder)
