"""Class-incremental heads, blurry boundaries, single passes, and streams with a mistake."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from forgetless import (
    SGD,
    Blurry,
    ConfigError,
    DataError,
    Method,
    Scenario,
    Task,
    TensorScenario,
    Training,
    fit,
    load_trace,
    scenario,
)
from forgetless.data import Split
from forgetless.launch.runs import resolve
from tests.conftest import blobs, forgetless


def points(labels, shift=0.0):
    """A numbered sample for each label."""
    labels = torch.as_tensor(labels)
    numbers = torch.arange(len(labels)).double() + shift
    return numbers.unsqueeze(1).expand(-1, 4).contiguous(), labels


def network(outputs):
    return lambda: torch.nn.Linear(4, outputs)


@pytest.mark.parametrize("full", [False, True])
def test_the_outputs_in_the_loss_and_in_the_accuracy(full):
    """Of classes seen so far in a growing head, of all in a full one; by hand with one step."""
    torch.manual_seed(0)
    pairs = [(torch.randn(6, 4), torch.arange(6) % 2 + 2 * t) for t in range(3)]
    tasks = TensorScenario([(p, p) for p in pairs], setting="class", full_head=full)
    assert [tasks.competing(0, t).stop for t in range(3)] == ([6] * 3 if full else [2, 4, 6])
    assert not tasks.has_heads
    model = torch.nn.Linear(4, 6).double()
    training = Training(epochs=1, batch_size=6, lr=0.5, dtype="float64")
    trace = fit(tasks, SGD(), model, training=training)
    for t, (x, y) in enumerate(pairs):
        stop = 6 if full else 2 * t + 2
        loss = cross_entropy(model(x.double())[:, :stop], y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= 0.5 * g
        torch.testing.assert_close(trace.weights(0, t)["weight"], model.weight.detach())
        for s in range(t + 1):
            right = model(pairs[s][0].double())[:, :stop].argmax(1) == pairs[s][1]
            assert trace.accuracy[0, t, s] == pytest.approx(100 * right.double().mean().item())


def test_a_full_head_on_the_command_line_and_in_the_trace(tmp_path, capsys):
    run = ["run", "split-digits", "--setting", "class", "--tasks", "2", "--train-per-class", "8"]
    for out, more in (("growing", []), ("full", ["--full-head"])):
        arguments = [*run, *more, "--method", "er", "--buffer", "20", "--out", tmp_path / out]
        assert forgetless([*arguments, "--epochs", "1"], capsys)[0] == 0
    growing, full = (load_trace(tmp_path / out) for out in ("growing", "full"))
    assert (growing.config["full_head"], full.config["full_head"]) == (False, True)
    assert growing.fingerprint["scenario"] != full.fingerprint["scenario"]
    assert not np.allclose(growing.weights(0, 0)["head.bias"], full.weights(0, 0)["head.bias"])


def test_a_full_head_belongs_to_the_setting_class(capsys):
    code, _, error = forgetless(["run", "split-digits", *SGD_, "--full-head"], capsys)
    assert (code, "split-digits does not use --full-head" in error) == (2, True)
    pair = points([0, 1])
    tasks = TensorScenario([(pair, pair)], full_head=True)
    with pytest.raises(ConfigError, match="full_head must be False in another setting than class"):
        fit(tasks, SGD(), network(2))


SHARE = 0.25
SGD_ = ("--method", "sgd")


def five(setting="class"):
    """Five tasks of forty numbered samples of two classes."""
    pairs = [points([2 * t, 2 * t + 1] * 20, 100 * t) for t in range(5)]
    if setting == "domain":
        pairs = [(x, y % 2) for x, y in pairs]
    return TensorScenario([(p, p) for p in pairs], setting=setting)


@pytest.mark.parametrize("setting", ["domain", "class"])
def test_each_task_gives_its_share_evenly_to_all_others(setting):
    plain, blurry = five(setting), Blurry(five(setting), SHARE)
    came = []
    for t in range(5):
        task = blurry.task(t, [0])
        numbers = task.train.inputs[:, 0]
        assert torch.equal(task.test.inputs, plain.task(t, [0]).test.inputs)
        origins = Counter((numbers / 100).long().tolist())
        assert origins.pop(t) == 30
        assert sorted(origins) == [s for s in range(5) if s != t]
        assert set(origins.values()) <= {2, 3}  # ten, dealt to four
        came += numbers.tolist()
        labels = {float(x): int(y) for p in range(5) for x, y in _pairs(plain, p)}
        assert [labels[n] for n in numbers.tolist()] == task.train.labels.tolist()
        assert (numbers[1:] < numbers[:-1]).sum() > 5  # in no order
    everything = [x for t in range(5) for x, _ in _pairs(plain, t)]
    assert sorted(came) == sorted(everything)  # each exactly once


def _pairs(tasks, t):
    train = tasks.task(t, [0]).train
    return zip(train.inputs[:, 0].tolist(), train.labels.tolist(), strict=True)


def test_all_classes_compete_where_boundaries_are_blurry():
    blurry = Blurry(five(), SHARE)
    assert [blurry.competing(t) for t in range(5)] == [range(10)] * 5
    assert blurry.classes(1) == range(2, 4)
    trace = fit(blurry, SGD(), network(10), training=Training(epochs=1))
    assert np.isfinite(trace.accuracy[0, -1]).all()


def test_blurry_permutations_keep_each_samples_own_order():
    options = {"tasks": 3, "train_per_class": 6}
    plain = scenario("permuted-digits", **options)
    blurry = scenario("permuted-digits", blurry=0.3, **options)
    seeds = [0, 5]
    ours = [blurry.task(t, seeds).train for t in range(3)]
    rows = {}
    for t in range(3):
        split = plain.task(t, seeds).train
        inputs, labels = split.take(torch.arange(len(split)).expand(2, -1))
        for i in range(len(split)):
            rows[inputs[0, i].numpy().tobytes()] = (inputs[1, i], int(labels[0, i]), t)
    met = Counter()
    for t, split in enumerate(ours):
        split = split.to(torch.device("cpu"), torch.float32)
        index = torch.arange(len(split)).expand(2, -1)
        inputs, labels = split.take(index)
        for i in range(len(split)):
            other, label, origin = rows[inputs[0, i].numpy().tobytes()]
            torch.testing.assert_close(inputs[1, i], other)
            assert int(labels[0, i]) == label
            met[t, origin] += 1
        few = split.subset(torch.tensor([3, 1]))
        torch.testing.assert_close(few.take(index[:, :2])[0], inputs[:, [3, 1]])
    assert met[0, 0] == met[2, 2] == 42
    assert met[0, 1] == 9


def test_blurry_on_the_command_line(tmp_path, capsys):
    arguments = ["run", "rotated-digits", *SGD_, "--blurry", "0.1", "--train-per-class", 8]
    code, out, _ = forgetless([*arguments, "--json", "--out", tmp_path / "b"], capsys)
    assert code == 0
    assert '"blurry": 0.1' in out
    code, _, error = forgetless(["run", "split-digits", *SGD_, "--blurry", "0.1"], capsys)
    assert code == 2
    assert "the setting of blurry tasks must be domain or class, not 'task'" in error
    code, _, error = forgetless(["run", "rotated-digits", *SGD_, "--blurry", "1"], capsys)
    assert (code, "--blurry must be a number in [0, 1), not 1" in error) == (2, True)
    with pytest.raises(ConfigError, match="number of blurry tasks must be at least 2, not 1"):
        Blurry(blobs(tasks=1), 0.1)


def test_a_plug_ins_tasks_can_be_blurry(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text("from tests.data.test_scenarios_streams import five\n\ndef tasks():\n"
                    "    return five()\n")  # fmt: skip
    model = tmp_path / "net.py"
    model.write_text("import torch\n\ndef net(inputs, outputs):\n"
                     "    return torch.nn.Linear(inputs, outputs)\n")  # fmt: skip
    arguments = [
        "run",
        f"{file}:tasks",
        *SGD_,
        "--model",
        f"{model}:net",
        "--epochs",
        "1",
        "--json",
    ]
    code, out, _ = forgetless([*arguments, "--blurry", "0.25", "--out", tmp_path / "o"], capsys)
    assert code == 0
    assert '"blurry": 0.25' in out


def test_online_is_one_pass_in_batches_of_ten(capsys):
    config = resolve("split-mnist", "er", online=True)
    assert (config.epochs, config.batch_size) == (1, 10)
    assert resolve("split-mnist", "er", online=True, batch_size=4).batch_size == 4
    assert resolve("split-mnist", "er").epochs == 5
    code, _, error = forgetless(["run", "split-digits", *SGD_, "--online", "--epochs", "2"], capsys)
    assert code == 2
    assert "--epochs must be 1 with --online, which is a single pass, not 2" in error


class Order(Method):
    """Notes the samples of every step."""

    name = "order"
    acts_on = "gradient"
    needs_batch = True

    def __init__(self, seen):
        self.seen = seen

    def init(self, view):
        return None

    def update(self, g, state, view):
        self.seen.append(view.batch.inputs[0, :, 0].tolist())
        return g, state

    def consolidate(self, state, view, task):
        return state


def test_a_stream_may_keep_its_order():
    seen, tasks = [], five("domain")
    training = Training(epochs=2, batch_size=16, shuffle=False, lr=1e-9)
    fit(tasks, Order(seen), network(2), training=training)
    epoch = [[*range(0, 16)], [*range(16, 32)], [*range(32, 40)]]
    for t in range(5):
        found = seen[6 * t : 6 * t + 6]
        assert found == [[100.0 * t + n for n in batch] for batch in epoch * 2]


class Made(Scenario):
    """Two tasks that a function makes."""

    name, setting, n_tasks, input_shape, n_outputs = "made", "class", 2, (4,), 4

    def __init__(self, make):
        self.make = make

    def classes(self, index):
        return range(2 * index, 2 * index + 2)

    def task(self, index, seeds):
        train, test = self.make(index)
        return Task(f"task {index + 1}", Split(*train), Split(*test))


def usual(index):
    x, y = points([2 * index, 2 * index + 1])
    return x.float(), y


def test_a_growing_head_that_meets_unknown_labels_is_one_clear_error():
    wrong = Made(lambda t: (points([0, 3]) if t == 0 else usual(t), usual(t)))
    message = (
        "task 1 of made has training samples of class 3, and the outputs that compete in it are "
        r"0 to 1: its classes\(\) must have all of them"
    )
    with pytest.raises(DataError, match=message):
        fit(wrong, SGD(), network(4))
    later = Made(lambda t: (usual(t), points([0, 9]) if t else usual(t)))
    with pytest.raises(DataError, match="task 2 of made has test samples of class 9"):
        fit(later, SGD(), network(4))


def test_a_stream_that_ends_is_one_clear_error():
    stream = iter([0])
    ends = Made(lambda t: (usual(t if t == 0 else next(stream)), usual(t)))
    next(stream)
    with pytest.raises(DataError, match="task 2 of made does not exist: its stream has ended"):
        fit(ends, SGD(), network(4))
    none = torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)
    empty = Made(lambda t: (none if t else usual(t), usual(t)))
    with pytest.raises(DataError, match="task 2 of made has no training samples"):
        fit(empty, SGD(), network(4))
