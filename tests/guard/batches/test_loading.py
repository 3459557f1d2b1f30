"""Loaders of every kind, and fair choices among their samples."""

import pytest
import torch
from scipy import stats
from torch import nn, optim
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import forgetless
from forgetless import AGEM, EWC, GEM, OGD, ConfigError, DataError, Guard, Joint
from forgetless.guard.batches.loading import Reservoir, TaskData
from forgetless.guard.batches.samples import Part, StoredSamples

from ...tangent import networks as net
from ...tangent.reference import built, integers, random
from ..problems import exact_basis, flat, mlp, task, train


class Normalised(DataLoader):
    """A loader that changes its batches."""

    def __iter__(self):
        for x, y in super().__iter__():
            yield (x - 100) / 10, y


class EverySecond(SequentialSampler):
    def __iter__(self):
        return iter(range(0, len(self.data_source), 2))

    def __len__(self):
        return len(self.data_source) // 2


class FirstHalf(RandomSampler):
    def __iter__(self):
        return iter(range(len(self.data_source) // 2))


class Once(IterableDataset):
    """A stream that goes on where it was left."""

    def __init__(self, data) -> None:
        self.stream = iter(list(zip(*data, strict=True)))

    def __iter__(self):
        return self.stream


def ended(loader, method=None, **options):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, method or OGD(samples=1000), **options)
    guard.end_task(loader)
    return model, optimizer, guard


def test_a_loader_that_changes_its_batches():
    x, y = task(0)
    model, optimizer, _ = ended(Normalised(TensorDataset(10 * x + 100, y), batch_size=7))
    basis = exact_basis(model, x, y)
    before = flat(model)
    train(model, optimizer, task(1), steps=3)
    delta = flat(model) - before
    assert float((basis @ delta).norm() / delta.norm()) < 1e-5


@pytest.mark.parametrize("kind", [EverySecond, FirstHalf])
def test_a_sampler_that_leaves_samples_out(kind):
    data = TensorDataset(*task(0))
    loader = DataLoader(data, sampler=kind(data), batch_size=7)
    _, _, guard = ended(loader)
    assert guard.memory_report().directions == len(data) // 2


@pytest.mark.parametrize("options", [{}, {"budget": "10MB"}])
def test_a_stream_that_can_be_read_once_is_remembered_as_a_whole(options):
    data = task(0)
    _, _, guard = ended(DataLoader(Once(data), batch_size=7), **options)
    assert guard.memory_report().directions == len(data[1])


@pytest.mark.parametrize("method", [EWC(), Joint()], ids=lambda m: m.name)
def test_what_walks_through_a_stream_twice_says_so(method):
    with pytest.raises(DataError, match=r"can be walked through only once.* give a list"):
        ended(DataLoader(Once(task(0)), batch_size=7), method)
    ended(list(DataLoader(Once(task(0)), batch_size=7)), method)


def test_an_empty_loader_has_no_samples():
    for loader in ([], DataLoader(Once((torch.empty(0, 5), torch.empty(0))), batch_size=7)):
        with pytest.raises(DataError, match="the loader has no samples"):
            ended(loader)


class Counting(Dataset):
    """Samples by number, and which of them were read."""

    def __init__(self, n: int = 50) -> None:
        self.x, self.y = task(0, n)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        self.read.append(i)
        return self.x[i], self.y[i]


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*task(0), strict=True)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def as_dicts(samples):
    return {
        "inputs": torch.stack([x for x, _ in samples]),
        "y": torch.stack([y for _, y in samples]),
    }


x, y = task(0)
pairs = TensorDataset(x, y)
# All of them hold the same thirty samples.
LOADERS = {
    "one batch": lambda: (x, y),
    "a dict": lambda: {"input": x, "labels": y},
    "a loader": lambda: DataLoader(pairs, batch_size=7),
    "a shuffled loader": lambda: DataLoader(pairs, batch_size=7, shuffle=True),
    "no last batch": lambda: DataLoader(pairs, batch_size=7, drop_last=True),
    "a subset's loader": lambda: DataLoader(Subset(pairs, range(30)), batch_size=8),
    "a sampler": lambda: DataLoader(pairs, batch_size=7, sampler=SubsetRandomSampler(range(30))),
    "a batch sampler": lambda: DataLoader(pairs, batch_sampler=[range(15), range(15, 30)]),
    "dicts by a collate": lambda: DataLoader(pairs, batch_size=7, collate_fn=as_dicts),
    "a list of batches": lambda: [(x[:20], y[:20]), [x[20:], y[20:]]],
    "a tuple of batches": lambda: ((x[:20], y[:20]), (x[20:], y[20:])),
    "a generator": lambda: ((x[i : i + 9], y[i : i + 9]) for i in range(0, 30, 9)),
    "an iterable dataset": lambda: DataLoader(Stream(), batch_size=7),
    "a loader's iterator": lambda: iter(DataLoader(pairs, batch_size=7)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_every_loader_gives_all_samples(name):
    model = net.Calls(lambda m, *a, **k: m.inner(*a, *k.values()), inner=mlp().double())
    exact = exact_basis(model.inner, x, y)
    unpack = None
    if name not in ("a dict", "dicts by a collate"):
        unpack = lambda batch: (batch[0].double(), batch[1])  # noqa: E731
    else:
        model, exact = model.float(), exact_basis(mlp(), x, y)
    guard = Guard(model, optim.SGD(model.parameters()), OGD(samples=30), unpack=unpack)
    guard.end_task(LOADERS[name]())
    rows = guard.state_dict()["memory.directions"].double()
    assert len(rows) == len(exact)
    torch.testing.assert_close((rows @ exact.T) @ exact, rows, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("method", [EWC(), Joint(), GEM(8)], ids=["ewc", "joint", "gem"])
def test_every_loader_with_methods_that_need_sizes(name, method):
    model = net.Calls(lambda m, *a, **k: m.inner(*a, *k.values()), inner=mlp())
    guard = Guard(model, optim.SGD(model.parameters()), method)
    guard.end_task(LOADERS[name]())
    tensors = guard.state_dict()
    if method.name == "joint" and name != "no last batch":
        kept = next(t for n, t in tensors.items() if n.endswith(("arg0", "inputs", "input")))
        assert sorted(kept.sum(1).tolist()) == pytest.approx(sorted(x.sum(1).tolist()))
    if method.name == "ewc" and name != "no last batch":
        reference = Guard(model, optim.SGD(model.parameters()), EWC())
        reference.end_task((x, y) if "dict" not in name else {"input": x, "labels": y})
        torch.testing.assert_close(
            tensors["memory.fisher"], reference.state_dict()["memory.fisher"], rtol=1e-4, atol=1e-9
        )


def test_a_last_batch_that_is_dropped_does_not_count():
    x, y = task(0)
    dropped = TaskData(DataLoader(TensorDataset(x, y), 7, drop_last=True), None, generator())
    assert dropped.size == sum(map(len, dropped.batches())) == 28


def test_only_the_chosen_samples_of_a_dataset_are_read():
    dataset = Counting()
    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters()), AGEM(memory=12), drift_samples=0)
    guard.end_task(DataLoader(dataset, batch_size=5, shuffle=True))
    assert len(dataset.read) == len(set(dataset.read)) == 12
    expected = torch.stack([dataset.x[i] for i in dataset.read])
    assert torch.equal(guard.state_dict()["memory.0:arg0"], expected)


def test_a_sampler_that_leaves_samples_out_is_followed():
    dataset = Counting()
    loader = DataLoader(dataset, batch_size=5, sampler=SubsetRandomSampler(range(10, 20)))
    TaskData(loader, None, generator()).draw(50)
    assert sorted(dataset.read) == list(range(10, 20))
    weighted = WeightedRandomSampler([1.0] + [0.0] * 49, num_samples=3)
    assert len(TaskData(DataLoader(dataset, 2, sampler=weighted), None, generator()).draw(50)) == 3


def numbers(loader, count: int, seed: int) -> list[int]:
    """The samples drawn from a loader of 0, 1, 2, …"""
    drawn = TaskData(loader, None, generator(seed)).draw(count)
    return torch.cat([part.args[0] for part in drawn.parts]).long().flatten().tolist()


FAIR = {
    "walked": lambda: [torch.arange(i, min(i + 6, 20)) for i in range(0, 20, 6)],
    "indexed": lambda: DataLoader(TensorDataset(torch.arange(20)), batch_size=6),
}


def aside(loader, count: int, seed: int) -> list[int]:
    """The samples set aside, after another choice that must not matter."""
    data = TaskData(loader, None, generator(0), Reservoir(count, generator(seed)))
    data.draw(3)
    return torch.cat([part.args[0] for part in data.set_aside().parts]).long().tolist()


@pytest.mark.parametrize("choose", [numbers, aside])
@pytest.mark.parametrize("kind", FAIR)
def test_every_sample_has_the_same_chance(kind, choose):
    counts = torch.zeros(20)
    for seed in range(600):
        drawn = choose(FAIR[kind](), 5, seed)
        assert len(drawn) == len(set(drawn)) == 5
        counts[drawn] += 1
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_a_pass_that_breaks_off_sets_nothing_aside():
    data = TaskData(FAIR["walked"](), None, generator(0), Reservoir(30, generator(0)))
    next(data.batches())
    found = torch.cat([part.args[0] for part in data.set_aside().parts])
    assert sorted(found.tolist()) == list(range(20))


@pytest.mark.parametrize("kind", FAIR)
def test_the_choice_depends_on_the_seed_alone(kind):
    assert numbers(FAIR[kind](), 5, 1) == numbers(FAIR[kind](), 5, 1)
    assert len({tuple(numbers(FAIR[kind](), 5, seed)) for seed in range(20)}) > 10
    assert sorted(numbers(FAIR[kind](), 100, 0)) == list(range(20))


def test_models_with_several_inputs():
    def run(m, first, second):
        return m.b(torch.tanh(m.a(first)) + second)

    model = built(lambda: net.Calls(run, a=nn.Linear(3, 5), b=nn.Linear(5, 4)))
    first, second, labels = random(6, 3), random(6, 5, seed=1), integers(4, 6)
    rows = []
    for batch, unpack in (
        ({"second": second, "first": first, "target": labels, "name": "ignored"}, None),
        ([(first, second, labels)], lambda b: (b[:2], b[2])),
        ([(first, second, labels)], lambda b: ({"first": b[0], "second": b[1]}, b[2])),
    ):
        guard = Guard(model, optim.SGD(model.parameters()), OGD(), unpack=unpack)
        guard.end_task(batch)
        rows.append(guard.state_dict()["memory.directions"])
        guard.remove()
    projections = [r.T @ r for r in rows]
    torch.testing.assert_close(projections[0], projections[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(projections[0], projections[2], rtol=0, atol=1e-10)


WRONG = {
    "a number": (5, None, "a loader must be iterable, not int"),
    "nothing": ([], None, "the loader has no samples"),
    "an empty dataset": (DataLoader(TensorDataset(x[:0], y[:0])), None, "has no samples"),
    "an empty batch": ((x[:0], y[:0]), None, "a batch has no samples"),
    "three parts": (
        [(x, y, y)],
        None,
        "a batch is a tuple of 3: say with unpack= how to take it apart, for example",
    ),
    "text": (
        [["one", "two"]],
        None,
        "inputs must be a tensor, a tuple or a dict of tensors, not str; say with unpack=",
    ),
    "an object": ([object()], None, "a batch is of type object: say with unpack="),
    "other lengths": ((x, y[:5]), None, "a batch must be of equally many samples each"),
    "labels in a list": (
        [(x, y.tolist())],
        None,
        "made of tensors with a leading dimension of samples, not 'target of type list'",
    ),
    "a dict of text": (
        {"text": "a", "labels": y},
        None,
        "a batch has no tensor to run the model on; unpack= says where it is",
    ),
    "one number": ((torch.tensor(3.0), y), None, "leading dimension of samples"),
    "inputs of another size": (
        (torch.randn(4, 5), y[:4]),
        None,
        r"the model does not take a batch's inputs \(.*\); say with unpack= which part",
    ),
    "unpack gives one thing": (
        (x, y),
        lambda b: b[0],
        "unpack= must return the model's inputs and the target",
    ),
    "unpack gives None": (
        (x, y),
        lambda b: None,
        "unpack= must return the model's inputs and the target",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("method", [OGD(4), AGEM(4), EWC()], ids=["ogd", "a-gem", "ewc"])
def test_batches_that_cannot_be_taken_apart(case, method):
    loader, unpack, message = WRONG[case]
    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters()), method, unpack=unpack)
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        guard.end_task(loader)
    assert "\n" not in str(caught.value)
    assert guard.tasks == 0


def test_samples_of_different_shapes_side_by_side():
    parts = [Part((torch.arange(4.0).view(2, 2),), {}, torch.tensor([0, 1]))]
    parts.append(Part((torch.arange(6.0).view(2, 3),), {}, torch.tensor([2, 3])))
    parts.append(Part((torch.arange(2.0).view(1, 2) + 10,), {}, torch.tensor([4])))
    both = StoredSamples.stacked(parts)
    assert [len(p) for p in both.parts] == [3, 2]
    assert len(both) == 5
    chosen = both.select(torch.tensor([2, 3]))
    assert [p.target.tolist() for p in chosen.parts] == [[4], [2]]
    again = StoredSamples.restore([both.tensors()])
    assert [p.named().keys() for p in again.parts] == [p.named().keys() for p in both.parts]
    more = both + chosen
    assert [p.target.tolist() for p in more.parts] == [[0, 1, 4, 4], [2, 3, 2]]


def test_what_is_remembered_does_not_follow_the_users_tensors():
    batch = x.clone(), y.clone()
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for method, options in ((AGEM(100), {}), (OGD(100), {"storage": "factored"})):
        guard = Guard(model, optimizer, method, **options)
        guard.end_task(batch)
        before = guard.state_dict()
        batch[0].zero_()
        for name, tensor in guard.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        batch[0].copy_(x)
        guard.remove()


def test_a_batch_as_a_loader_gives_it_is_one_batch():
    data = TensorDataset(torch.randn(9, 5), torch.randint(0, 3, (9,)))
    batch = next(iter(DataLoader(data, batch_size=9)))
    assert isinstance(batch, list)
    model = nn.Linear(5, 3)
    guard = forgetless.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), AGEM(9))
    guard.end_task(batch)
    assert guard.tasks == 1


def test_a_list_that_may_be_one_batch_or_two_is_refused():
    model = nn.Linear(50, 50)
    guard = forgetless.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), OGD(100))
    pair = [torch.randn(20, 50), torch.randn(20, 50)]
    for either in (pair, [pair[0], pair[1][:, :1]]):
        with pytest.raises(ConfigError, match="may be one batch or two"):
            guard.end_task(either)
    guard.end_task([(part,) for part in pair])
    assert guard.tasks == 1
