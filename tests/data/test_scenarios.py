"""From images to tasks."""

import pytest
import torch
from torch.utils.data import TensorDataset

from forgetless import ConfigError, DataError, TensorScenario, scenario
from forgetless.data import load_source, scenarios
from forgetless.data.scenarios import first_of_each_class


def everything(split, seeds):
    return split.take(torch.arange(len(split)).expand(seeds, -1))


def test_rotated_tasks_show_the_same_images_turned():
    rotated = scenario("rotated-digits", tasks=3, step_degrees=90)
    first, second, third = (rotated.task(t, [0]) for t in range(3))
    assert [t.name for t in (first, second, third)] == ["0°", "90°", "180°"]
    torch.testing.assert_close(first.train.inputs.rot90(1, (2, 3)), second.train.inputs)
    torch.testing.assert_close(first.test.inputs.rot90(2, (2, 3)), third.test.inputs)
    assert torch.equal(first.train.labels, third.train.labels)
    assert not rotated.has_heads


@pytest.mark.parametrize("family", ["rotated", "permuted", "split"])
def test_nobody_writes_to_the_images_that_scenarios_share(family, monkeypatch):
    images = load_source("digits")
    monkeypatch.setattr(scenarios, "shared_source", lambda *args, **options: images)
    before = [tensor.clone() for tensor in (images.test_images, images.test_labels)]
    task = scenario(f"{family}-digits", tasks=1).task(0, [0])
    for split in (task.train, task.test):
        split.inputs.zero_()
        split.labels.zero_()
    assert torch.equal(images.test_images, before[0])
    assert torch.equal(images.test_labels, before[1])


def test_permuted_tasks_have_an_order_for_each_seed_and_task():
    permuted = scenario("permuted-digits", tasks=3)
    plain, _ = everything(permuted.task(0, [4, 9]).test, 2)
    torch.testing.assert_close(plain[0], plain[1])
    task = permuted.task(1, [4, 9])
    inputs, labels = everything(task.test, 2)
    assert not torch.equal(inputs[0], inputs[1])
    torch.testing.assert_close(inputs.flatten(2).sort().values, plain.flatten(2).sort().values)
    assert torch.equal(labels[0], permuted.task(0, [4]).test.labels)
    # Training and test set share the order, which depends on the seed and the task alone.
    alone, _ = everything(permuted.task(1, [9]).test, 1)
    torch.testing.assert_close(alone[0], inputs[1])
    other, _ = everything(permuted.task(2, [9]).test, 1)
    assert not torch.equal(alone, other)


def test_split_tasks_have_their_own_classes():
    split = scenario("split-digits", tasks=3, classes_per_task=3)
    assert split.has_heads
    assert split.n_outputs == 9
    assert [split.classes(t) for t in range(3)] == [range(3), range(3, 6), range(6, 9)]
    for t in range(3):
        task = split.task(t, [0])
        for part in (task.train, task.test):
            assert set(part.labels.tolist()) == set(split.classes(t))


def test_train_per_class_takes_the_first_of_the_file():
    labels = torch.tensor([1, 0, 1, 1, 0, 0])
    assert first_of_each_class(labels, 2, 2).tolist() == [0, 1, 2, 4]
    assert first_of_each_class(labels, 2, 0).tolist() == list(range(6))
    small = scenario("rotated-digits", train_per_class=7)
    counts = torch.bincount(small.task(0, [0]).train.labels)
    assert counts.tolist() == [7] * 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 0}, "--tasks must be a whole number of at least 1"),
        ({"tasks": 6}, "6 tasks of 2 classes need 12 classes"),
        ({"classes_per_task": 0}, "--classes-per-task"),
        ({"tasks": 2.5}, "--tasks must be a whole number of at least 1, not 2.5"),
        ({"tasks": "3"}, "--tasks must be a whole number of at least 1, not '3'"),
        ({"classes_per_task": 1.5}, "--classes-per-task must be a whole number"),
        ({"step_degrees": "5"}, "--step-degrees must be a finite number"),
        ({"train_per_class": 10_000}, "at most 1"),
        ({"train_per_class": -1}, "at least 0"),
        ({"nonsense": 1}, "unknown setting 'nonsense'"),
    ],
)
def test_impossible_tasks_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        scenario("split-digits", **options)


def test_mnist_as_the_paper_prepares_it(real_data):
    mnist = scenario("rotated-mnist", data=real_data)
    task = mnist.task(0, [0])
    assert mnist.n_tasks == 15
    assert task.train.inputs.shape == (10_000, 1, 32, 32)
    assert task.test.inputs.shape == (10_000, 1, 32, 32)
    assert task.train.inputs.min().item() == pytest.approx(-0.1 / 0.2752)
    assert task.train.inputs.max().item() == pytest.approx(0.9 / 0.2752)
    assert torch.bincount(task.train.labels).tolist() == [1000] * 10
    assert len(scenario("split-mnist", data=real_data).task(0, [0]).train) == 2000


def test_cifar_as_the_paper_prepares_it(real_data):
    cifar = scenario("split-cifar100", data=real_data)
    task = cifar.task(19, [0])
    assert cifar.n_tasks == 20
    assert task.train.inputs.shape == (2500, 3, 32, 32)
    assert task.test.inputs.shape == (500, 3, 32, 32)
    assert set(task.train.labels.tolist()) == set(range(95, 100))


def pair(n=4, classes=2, shape=(3,)):
    return torch.zeros(n, *shape), torch.arange(n) % classes


def test_any_tensors_make_a_scenario():
    shared = TensorScenario([(pair(), pair()), (pair(classes=3), pair())])
    assert (shared.n_tasks, shared.n_outputs, shared.has_heads) == (2, 3, False)
    heads = TensorScenario([(pair(), pair()), (pair(classes=3), pair())], heads=True)
    assert heads.n_outputs == 5
    assert heads.task(1, [0]).train.labels.tolist() == [2, 3, 4, 2]


def test_any_datasets_make_a_scenario():
    dataset = TensorDataset(*pair(n=5))
    from_datasets = TensorScenario([(dataset, pair())])
    torch.testing.assert_close(from_datasets.task(0, [0]).train.labels, pair(n=5)[1])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ((torch.zeros(0, 3), torch.zeros(0).long()), "training set of task 1 is empty"),
        ((torch.zeros(4, 3), torch.zeros(3).long()), "one whole-number label per input"),
        ((torch.zeros(4, 3), torch.zeros(4)), "one whole-number label per input"),
        ((torch.zeros(4, 3), torch.tensor([0, 1, -1, 0])), "negative label, -1"),
        ((torch.full((4, 3), torch.nan), torch.zeros(4).long()), "NaN or infinite"),
        ((torch.zeros(4, 3).long(), torch.zeros(4).long()), "floating-point inputs"),
        ((torch.zeros(4, 5), torch.zeros(4).long()), "have shape"),
    ],
)
def test_unusable_tensors_are_refused(train, message):
    with pytest.raises(DataError, match=message):
        TensorScenario([(train, pair())])


@pytest.mark.parametrize(
    "source",
    [
        TensorDataset(torch.zeros(3, 2), torch.tensor([0.9, 0, 1])),  # not rounded to a class
        TensorDataset(torch.zeros(3, 2), torch.eye(3).long()),  # one-hot
        TensorDataset(torch.zeros(3, 2), torch.zeros(3).long(), torch.zeros(3)),  # three parts
        torch.zeros(3, 2),
        "a file",
    ],
)
def test_unusable_datasets_are_refused(source):
    with pytest.raises(DataError, match="training set of task 1"):
        TensorScenario([(source, pair(shape=(2,)))])


def test_tasks_may_come_from_a_generator():
    assert TensorScenario((pair(), pair()) for _ in range(3)).n_tasks == 3


def test_a_scenario_needs_tasks():
    with pytest.raises(DataError, match="at least one task"):
        TensorScenario([])


def test_validation_images_are_the_last_of_the_training_images_and_not_trained_on():
    plain, held = (
        scenario("permuted-digits", tasks=1, train_per_class=20, validation_per_class=n).task(
            0, [0]
        )
        for n in (0, 5)
    )
    assert len(held.train) == 150
    assert len(held.test) == 50
    for c in range(10):
        of_class = plain.train.inputs[plain.train.labels == c]
        assert torch.equal(held.train.inputs[held.train.labels == c], of_class[:15])
        assert torch.equal(held.test.inputs[held.test.labels == c], of_class[15:])


def test_some_images_must_be_left_to_train_on():
    with pytest.raises(ConfigError, match="--validation-per-class"):
        scenario("rotated-digits", tasks=1, train_per_class=5, validation_per_class=5)
