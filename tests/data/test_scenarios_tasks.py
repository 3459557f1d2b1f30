"""Tensors and datasets to tasks."""

import pytest
import torch
from torch.utils.data import TensorDataset

from forgetless import SGD, ConfigError, DataError, Scenario, TensorScenario, fit
from forgetless.data import Split, Task


def pair(n=4, classes=2, shape=(3,)):
    return torch.zeros(n, *shape), torch.arange(n) % classes


def test_any_tensors_make_a_scenario():
    shared = TensorScenario([(pair(), pair()), (pair(classes=3), pair())])
    assert (shared.n_tasks, shared.n_outputs, shared.has_heads) == (2, 3, False)
    heads = TensorScenario([(pair(), pair()), (pair(classes=3), pair())], setting="task")
    assert heads.n_outputs == 5
    assert heads.task(1, [0]).train.labels.tolist() == [2, 3, 4, 2]


def labelled(*labels):
    """A training and a test set with these labels."""
    pair = torch.zeros(len(labels), 3), torch.tensor(labels)
    return pair, pair


def test_the_setting_decides_which_outputs_compete():
    task = TensorScenario([labelled(0, 1), labelled(0, 1, 2)], setting="task")
    assert [task.competing(0, 1), task.competing(1, 1)] == [range(2), range(2, 5)]
    domain = TensorScenario([labelled(0, 1), labelled(0, 1, 2)])
    assert [domain.competing(0), domain.competing(0, 1)] == [range(3), range(3)]
    grows = TensorScenario([labelled(0, 1), labelled(2, 3), labelled(4, 1)], setting="class")
    assert [grows.classes(t) for t in range(3)] == [range(2), range(2, 4), range(1, 5)]
    assert [grows.competing(0, t) for t in range(3)] == [range(2), range(4), range(5)]
    assert grows.competing(1, 0) == range(4)  # a task to come brings its own
    assert grows.n_outputs == 5
    assert not grows.has_heads
    assert grows.task(1, [0]).train.labels.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("setting", "second", "message"),
    [
        ("task", (2, 3), "labels of task 2 start at 2"),
        ("domain", (2, 3), "task 2 has none of the labels of task 1"),
        ("class", (0, 1), "task 2 must add the labels 2, 3, …, not 0, 1"),
        ("class", (3, 4), "task 2 must add the labels 2, 3, …, not 3, 4"),
        ("heads", (0, 1), "setting must be task, domain or class, not 'heads'"),
    ],
)
def test_labels_of_another_setting_are_refused(setting, second, message):
    with pytest.raises(ConfigError, match=message):
        TensorScenario([labelled(0, 1), labelled(*second)], setting=setting)


class Own(Scenario):
    """Two tasks of one sample, with the classes given."""

    name, n_tasks, input_shape, n_outputs = "own", 2, (3,), 4

    def __init__(self, *classes, setting=None):
        self._classes = classes
        if setting is not None:
            self.setting = setting

    def task(self, index, seeds):
        split = Split(torch.zeros(1, 3), torch.tensor([self._classes[index].start]))
        return Task(f"task {index}", split, split)

    def classes(self, index):
        return self._classes[index]


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (Own(range(2), range(2, 4)), "the setting of own must be task, domain or class"),
        (
            Own(range(2), range(2, 4), setting="shared"),
            "the setting of own must be .* not 'shared'",
        ),
        (Own(range(4), range(2, 4), setting="domain"), "classes of task 2 must be all outputs"),
        (Own(range(1), range(2, 4), setting="class"), "classes of task 2 must be .* without a gap"),
        (Own(range(2), range(2, 5), setting="task"), "within the 4 outputs"),
        (Own(range(2), range(2, 2), setting="task"), "within the 4 outputs"),
    ],
)
def test_a_scenario_of_ones_own_must_agree_with_its_setting(scenario, message):
    with pytest.raises(ConfigError, match=message):
        fit(scenario, SGD())


def test_any_datasets_make_a_scenario():
    dataset = TensorDataset(*pair(n=5))
    from_datasets = TensorScenario([(dataset, pair())])
    torch.testing.assert_close(from_datasets.task(0, [0]).train.labels, pair(n=5)[1])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ((torch.zeros(0, 3), torch.zeros(0).long()), "training set of task 1 is empty"),
        ((torch.zeros(4, 3), torch.zeros(3).long()), "one integer label per input"),
        ((torch.zeros(4, 3), torch.zeros(4)), "one integer label per input"),
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
