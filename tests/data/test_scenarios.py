"""From images to tasks; rotation against Pillow."""

import numpy as np
import pytest
import torch
from PIL import Image

from forgetless import ConfigError, scenario
from forgetless.data import ScenarioOptions, build_scenario, load_source, scenarios
from forgetless.data.scenarios import first_of_each_class, normalize, rotate
from forgetless.support.plugins import load_object


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


def test_split_tasks_may_share_a_head_or_let_all_classes_seen_compete():
    options = {"tasks": 3, "classes_per_task": 3, "train_per_class": 5}
    plain = scenario("split-digits", **options)
    assert plain.setting == "task"
    grows = scenario("split-digits", setting="class", **options)
    assert grows.n_outputs == 9
    assert [grows.competing(0, t) for t in range(3)] == [range(3), range(6), range(9)]
    shared = scenario("split-digits", setting="domain", **options)
    assert shared.n_outputs == 3
    for t in range(3):
        ours, theirs, within = (s.task(t, [0]).train for s in (plain, grows, shared))
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.labels - 3 * t, within.labels)
        assert torch.equal(ours.inputs, within.inputs)
    for made in (plain, grows, shared, scenario("rotated-digits")):
        made.check()
        assert made.recipe["setting"] == made.setting
        assert made.has_heads == (made.setting == "task")


def test_a_setting_is_for_split_scenarios():
    with pytest.raises(ConfigError, match="setting must be task or domain or class, not 'heads'"):
        scenario("split-digits", setting="heads")
    assert scenario("rotated-digits").setting == "domain"


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


def validated(count, seed):
    tasks = scenario(
        "permuted-digits",
        tasks=1,
        train_per_class=20,
        validation_per_class=count,
        validation_seed=seed,
    )
    return tasks, tasks.task(0, [0])


def rows(split):
    return {tuple(x.flatten().tolist()) for x in split.inputs}


def test_validation_images_are_a_seeded_choice_among_the_training_images():
    tasks, plain = validated(0, 0)
    assert tasks.measured_on == "test"
    assert "validation_seed" not in tasks.recipe
    held, again, other = (validated(5, seed)[1] for seed in (0, 0, 1))
    assert validated(5, 0)[0].measured_on == "validation"
    assert validated(5, 3)[0].recipe["validation_seed"] == 3
    assert torch.bincount(held.test.labels).tolist() == [5] * 10
    assert torch.bincount(held.train.labels).tolist() == [15] * 10
    assert not rows(held.train) & rows(held.test)
    assert rows(held.train) | rows(held.test) == rows(plain.train)
    assert torch.equal(held.test.inputs, again.test.inputs)
    assert rows(held.test) != rows(other.test)
    last = [plain.train.inputs[plain.train.labels == c][15:] for c in range(10)]
    assert rows(held.test) != {tuple(x.flatten().tolist()) for x in torch.cat(last)}


def test_some_images_must_be_left_to_train_on():
    with pytest.raises(ConfigError, match="--validation-per-class"):
        scenario("rotated-digits", tasks=1, train_per_class=5, validation_per_class=5)


@pytest.mark.parametrize("shape", [(32, 32), (8, 8), (9, 12)])
@pytest.mark.parametrize("degrees", [0, 5, 20, 45, 70, 90, 180, 270, -30, 123.4, 365])
def test_rotation_is_pillows(shape, degrees):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (3, 2, *shape), dtype=torch.uint8, generator=generator)
    turned = rotate(images, degrees)
    for ours, image in zip(turned.flatten(0, 1), images.flatten(0, 1), strict=True):
        theirs = np.asarray(Image.fromarray(image.numpy()).rotate(degrees))
        # Pillow rounds coordinates to 1/65536, which may decide a tie the other way.
        assert (ours.numpy() != theirs).sum() <= 1


def test_rotation_is_counter_clockwise():
    image = torch.zeros(1, 1, 3, 3, dtype=torch.uint8)
    image[0, 0, 1, 2] = 255  # right
    assert rotate(image, 90)[0, 0, 0, 1] == 255  # up


def test_normalization_is_per_channel():
    images = torch.full((1, 2, 1, 1), 255, dtype=torch.uint8)
    result = normalize(images, (0.5, 0.0), (0.25, 2.0))
    torch.testing.assert_close(result.flatten(), torch.tensor([2.0, 0.5]))


def test_a_scenario_in_a_file_stays_as_it_is(tmp_path):
    file = tmp_path / "own_tasks.py"
    file.write_text(
        "import torch\n"
        "from forgetless import TensorScenario\n"
        "part = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])\n"
        "given = TensorScenario([(part, part)] * 2, setting='domain', name='as it was')\n"
    )
    found = build_scenario(f"{file}:given", ScenarioOptions())
    given = load_object(f"{file}:given", "--scenario")
    assert (found.name, given.name) == ("given", "as it was")
    assert found.recipe == {"setting": "domain", "scenario_from": "as given"}
    assert given.recipe is None
