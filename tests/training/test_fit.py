"""Fitting: any model, any tensors, and what is refused."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from forgetless import (
    AGEM,
    EWC,
    GEM,
    OGD,
    PCAOGD,
    SGD,
    ConfigError,
    TensorScenario,
    Training,
    TrainingError,
    fit,
    scenario,
)
from forgetless.trace import BEST_WITHIN, merged_seeds
from tests.conftest import blobs
from tests.methods.in_place import InPlace

TRAINING = Training(lr=0.05, epochs=2, batch_size=8)


def by_hand(
    tasks, model: nn.Module, order: list[torch.Tensor], lr: float
) -> dict[str, torch.Tensor]:
    """The plainest loop there is, on given batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for task, batches in zip(tasks, order, strict=True):
        for index in batches:
            optimizer.zero_grad()
            inputs, labels = task.train.inputs[index].double(), task.train.labels[index]
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return model.state_dict()


def test_plain_sgd_is_torchs_sgd():
    """Against torch.optim in an ordinary loop that sees the same batches."""
    one_batch = Training(lr=0.1, epochs=4, batch_size=1000, dtype="float64")
    tasks = blobs(tasks=2)
    start = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    trace = fit(tasks, SGD(), start, training=one_batch)
    everything = [torch.arange(24)] * 4
    ours = trace.weights(0, 1)
    theirs = by_hand([tasks.task(t, [0]) for t in range(2)], start, [everything] * 2, 0.1)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight)


def test_accuracy_is_counted_on_the_test_set():
    tasks = blobs(tasks=2)
    model = nn.Linear(6, 3)
    trace = fit(tasks, SGD(), model, training=TRAINING)
    test = tasks.task(0, [0]).test
    model.load_state_dict(trace.weights(0, 1))
    expected = (model(test.inputs).argmax(1) == test.labels).float().mean() * 100
    assert trace.accuracy[0, 1, 0] == pytest.approx(expected.item())


def test_heads_choose_within_their_own_classes():
    """A test sample of task 1 may not be given a class of task 2, however large its logit."""
    pair = torch.eye(2), torch.tensor([0, 1])
    tasks = TensorScenario([(pair, pair), (pair, pair)], setting="task")
    model = nn.Linear(2, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [9, 9], [9, 9]]))
    trace = fit(tasks, SGD(), model, heads=[], training=Training(lr=1e-6, epochs=1))
    assert trace.accuracy[0, 0, 0] == 100


def test_classes_seen_so_far_compete_in_class_incremental_learning():
    """Those of a later task compete only once it was learned, and then for earlier tasks too."""
    pairs = [(torch.eye(2), torch.tensor([c, c + 1])) for c in (0, 2, 4)]
    tasks = TensorScenario([(pair, pair) for pair in pairs], setting="class")
    model = nn.Linear(2, 6, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0], [0, 1], [0.5, 0], [0, 2], [9, 0], [0, 9]]))
    trace = fit(tasks, SGD(), model, training=Training(lr=1e-6, epochs=1, evaluate="all"))
    assert trace.accuracy[0].tolist() == [[100, 50, 100], [50, 50, 100], [0, 0, 100]]
    assert trace.config["setting"] == "class"


def test_a_class_incremental_loss_is_over_the_classes_seen_so_far():
    """A-GEM with all samples in each step, by hand: new and stored samples share the outputs."""
    generator = torch.Generator().manual_seed(1)
    pairs = [
        (torch.randn(12, 4, generator=generator).double(), torch.arange(12) % 2 + c)
        for c in (0, 2, 4)
    ]
    tasks = TensorScenario([(pair, pair) for pair in pairs], setting="class")
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6)).double()
    training = Training(lr=0.3, epochs=3, batch_size=12, dtype="float64")
    trace = fit(tasks, AGEM(memory=12, batch_size=100), model, training=training)

    def gradient(samples, seen):
        x, y = (torch.cat(parts) for parts in zip(*samples))
        loss = cross_entropy(model(x)[:, :seen], y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    for t in range(3):
        for _ in range(3):
            g = gradient(pairs[t : t + 1], 2 * t + 2)
            if t > 0:
                r = gradient(pairs[:t], 2 * t + 2)
                g = g - (g @ r).clamp(max=0) / (r @ r) * r
            with torch.no_grad():
                theta = nn.utils.parameters_to_vector(model.parameters())
                nn.utils.vector_to_parameters(theta - 0.3 * g, model.parameters())
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(trace.weights(0, t)[name], weight, rtol=1e-12, atol=1e-12)


def test_a_growing_head_does_not_leak_the_task():
    """Split digits: own classes are easy to tell apart, and forgotten where all seen compete."""
    last = {}
    for setting in ("task", "class"):
        tasks = scenario("split-digits", setting=setting, train_per_class=40)
        trace = fit(tasks, SGD(), training=Training(lr=0.1, epochs=5))
        last[setting] = trace.accuracy[0, -1]
    assert last["task"][:-1].mean() > 60
    assert last["class"][:-1].mean() < 20
    assert last["class"][-1] > 80


def test_seeds_differ_and_a_given_network_is_where_all_start():
    tasks = blobs()
    two = fit(tasks, SGD(), seeds=[0, 1], training=TRAINING)
    assert not torch.equal(two.weights(0, 0)["head.bias"], two.weights(1, 0)["head.bias"])
    start = nn.Linear(6, 3)
    still = Training(lr=1e-12, epochs=1)
    same = fit(tasks, SGD(), start, seeds=[0, 1], training=still)
    for seed in (0, 1):
        torch.testing.assert_close(same.weights(seed, 0)["weight"], start.weight.data)


def test_global_generators_are_left_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    fit(blobs(), SGD(), training=TRAINING)
    assert torch.equal(torch.rand(3), expected)


def test_dropout_is_reproducible():
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    one, two = (fit(blobs(), SGD(), network, training=TRAINING) for _ in range(2))
    assert torch.equal(one.weights(0, 1)["0.weight"], two.weights(0, 1)["0.weight"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6, bias=False)
        self.decode = nn.Linear(6, 6, bias=False)
        self.decode.weight = self.encode.weight
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.decode(torch.tanh(self.encode(x))))


@pytest.mark.parametrize("together", [1, 2])
def test_tied_weights_stay_tied(together):
    training = replace(TRAINING, seeds_together=together)
    trace = fit(blobs(), OGD(samples=5), Tied, seeds=2, training=training)
    weights = trace.weights(1, 1)
    assert torch.equal(weights["encode.weight"], weights["decode.weight"])
    Tied().load_state_dict(weights)


def test_batch_norm_statistics_are_learned_and_saved():
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))

    trace = fit(blobs(), SGD(), network, training=TRAINING)
    weights = trace.weights(0, 1)
    assert weights["1.num_batches_tracked"].item() == 2 * 2 * 3
    assert weights["1.running_mean"].abs().max() > 0
    # From step 4 on in eval mode: the statistics stay as they were then.
    fixed = fit(blobs(), SGD(), network, training=replace(TRAINING, eval_mode_after=4))
    assert fixed.weights(0, 1)["1.num_batches_tracked"].item() == 4


def test_a_last_batch_of_one_does_not_break_batch_norm():
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))

    fit(blobs(n=25), SGD(), network, training=replace(TRAINING, batch_size=8))


def test_frozen_parameters_stay_as_initialised(split_digits):
    trace = fit(split_digits, SGD(), training=replace(TRAINING, freeze="body.1, body.3.bias"))
    first, last = trace.weights(0, 0), trace.weights(0, 2)
    assert torch.equal(first["body.1.weight"], last["body.1.weight"])
    assert torch.equal(first["body.3.bias"], last["body.3.bias"])
    assert not torch.equal(first["body.3.weight"], last["body.3.weight"])


def test_unprotected_parameters_follow_plain_sgd():
    tasks = blobs(n=24)
    names = {"0.weight": True, "0.bias": True, "2.weight": False, "2.bias": False}
    training = Training(lr=0.1, epochs=1, batch_size=24, dtype="float64", unprotected="0.")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    trace = fit(tasks, OGD(samples=12), model, training=training)
    before, after = trace.weights(0, 0), trace.weights(0, 1)
    model.double().load_state_dict(before)
    train = tasks.task(1, [0]).train
    inputs, labels = train.take(torch.arange(24)[None])
    cross_entropy(model(inputs[0].double()), labels[0]).backward()
    for name, parameter in model.named_parameters():
        plain = torch.allclose(after[name], before[name] - 0.1 * parameter.grad, atol=1e-12)
        assert plain == names[name]


def test_evaluations_within_tasks_note_the_best_and_change_nothing():
    training = replace(TRAINING, epochs=4)
    plain = fit(blobs(tasks=3), SGD(), seeds=2, training=training)
    trace = fit(blobs(tasks=3), SGD(), seeds=2, training=replace(training, evaluate_every=1))
    np.testing.assert_array_equal(trace.accuracy, plain.accuracy)
    for row, seed in enumerate(trace.seeds):
        best = trace.outcome[BEST_WITHIN][str(seed)]
        # The end of a task is the end of its last epoch.
        assert all(best >= np.nanmax(trace.accuracy[row], 0))
    every = replace(training, evaluate_every=1)
    apart = [fit(blobs(tasks=3), SGD(), seeds=[seed], training=every) for seed in (0, 1)]
    assert merged_seeds(apart).outcome == trace.outcome


def test_all_tasks_are_evaluated_when_asked():
    trace = fit(blobs(tasks=3), SGD(), training=replace(TRAINING, evaluate="all"))
    assert np.isfinite(trace.accuracy).all()


def test_progress_goes_from_nothing_to_everything():
    seen = []
    fit(blobs(), SGD(), seeds=2, training=TRAINING, observer=seen.append)
    done = [p.done for p in seen]
    assert done == sorted(done)
    assert done[-1] == pytest.approx(1)
    assert seen[0].accuracy is None
    assert seen[-1].accuracy is not None
    assert (seen[-1].task, seen[-1].tasks, seen[-1].epoch, seen[-1].seeds) == (2, 2, 2, (1,))


def test_dropout_leaves_seeds_independent():
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    training = replace(TRAINING, seeds_together=2)
    alone = fit(blobs(), SGD(), network, seeds=[1], training=training)
    beside = fit(blobs(), SGD(), network, seeds=[0, 1], training=training)
    assert torch.equal(alone.weights(1, 1)["0.weight"], beside.weights(1, 1)["0.weight"])


def test_every_sample_is_trained_on_unless_batch_norm_forbids():
    """25 samples in batches of 8 and one of 1: the single one counts too."""
    steps = []

    class Counts(nn.Linear):
        def forward(self, x):
            if self.training:
                steps.append(len(x))
            return super().forward(x)

    fit(blobs(n=25), SGD(), lambda: Counts(6, 3), training=replace(TRAINING, epochs=1))
    assert sorted(steps[:4]) == [1, 8, 8, 8]


class Scalar(nn.Module):
    """A model with a parameter of no dimension and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.out = nn.Linear(6, 3)
        self.register_buffer("note", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.scale * self.out(x) / x.std(1, keepdim=True)


@pytest.mark.parametrize("together", [1, 2])
def test_unusual_models(together):
    training = replace(TRAINING, seeds_together=together)
    trace = fit(blobs(), PCAOGD(5, 10), Scalar, seeds=2, training=training)
    assert "note" not in trace.weights(0, 1)
    Scalar().load_state_dict(trace.weights(0, 1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(2, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(input=self.cell(x.view(len(x), 3, 2))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("method", [OGD(4), PCAOGD(4, 8), EWC(1.0)], ids=lambda m: m.name)
def test_recurrent_models(kind, method):
    fit(blobs(), method, lambda: Recurrent(kind), training=TRAINING)


def test_tasks_whose_features_have_no_rank():
    """One sample, centred: nothing is left to protect, and nothing breaks."""
    pair = torch.randn(1, 6), torch.tensor([0])
    tasks = TensorScenario([(pair, pair), (pair, pair)])
    trace = fit(tasks, PCAOGD(5, 5, centred=True), lambda: nn.Linear(6, 1), training=TRAINING)
    assert trace.state(0)["directions"].shape == (0, 7)


def test_gem_that_diverges_says_so():
    tasks = blobs(n=8)
    loud = TensorScenario(
        [
            ((1e20 * tasks.task(t, [0]).train.inputs, tasks.task(t, [0]).train.labels),) * 2
            for t in (0, 1)
        ]
    )
    with pytest.raises(TrainingError, match="NaN or infinite by step"):
        fit(loud, GEM(4), lambda: nn.Linear(6, 3), training=replace(TRAINING, lr=1e20))


class TwoOutputs(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 0}, "seeds must be"),
        ({"seeds": [1, 1]}, "seeds must be"),
        ({"seeds": [-1]}, "seeds must be"),
        ({"keep": "some"}, "keep must be"),
        ({"device": "teapot"}, "device 'teapot' cannot be used"),
        ({"device": "meta"}, "device 'meta' cannot be used"),
        ({"model": nn.Linear(5, 3)}, r"does not take inputs of shape \(6,\)"),
        ({"model": nn.Linear(6, 4)}, "must give 3 outputs per sample"),
        ({"model": nn.Flatten()}, "no trainable parameters"),
        ({"model": lambda: TwoOutputs()}, "one tensor of outputs, not a tuple"),
        ({"seeds": "all"}, "seeds must be"),
        ({"model": lambda: "a network"}, "model must be a torch.nn.Module"),
        ({"training": Training(freeze="nowhere")}, "freeze must be the beginning"),
        ({"training": Training(unprotected="nowhere")}, "unprotected must be the beginning"),
        ({"training": Training(unprotected="body, head")}, "that are to be protected"),
        (
            {"training": Training(unprotected="body.1", freeze="body")},
            "unprotected must be what is trained, and freeze says that it is not, not 'body.1'",
        ),
        (
            {"training": Training(unprotected="body"), "method": AGEM(4, heads="released")},
            "nothing can be left unprotected",
        ),
        (
            {
                "scenario": scenario("split-digits", setting="class", tasks=2),
                "method": AGEM(4, heads="released"),
            },
            "A-GEM with these options needs a head for each task",
        ),
        ({"heads": ["nowhere"]}, "heads must be the beginning"),
        ({"method": "sgd"}, r"method must be a method with its settings, such as SGD\(\)"),
        ({"method": SGD}, "method must be a method with its settings"),
        ({"scenario": "rotated-digits"}, "scenario must be a Scenario, such as"),
        ({"training": {"epochs": 1}}, "training must be a Training"),
        ({"checkpoint_every": "5"}, "checkpoint_every must be a number of minutes"),
    ],
)
def test_what_cannot_be_fitted_is_refused(options, message, tmp_path):
    arguments = {"scenario": blobs(), "method": SGD()} | options
    with pytest.raises(ConfigError, match=message):
        fit(**arguments, out=tmp_path / "trace")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "setting",
    [
        {"epochs": 0}, {"batch_size": 0}, {"lr": 0.0}, {"lr": float("nan")}, {"lr": float("inf")},
        {"dtype": "int8"}, {"eval_mode_after": -1}, {"evaluate": "none"}, {"seeds_together": -1},
        {"epochs": 1.5}, {"epochs": True}, {"batch_size": 2.5}, {"batch_size": "8"}, {"lr": "a"},
        {"eval_mode_after": 0.5}, {"seeds_together": 1.5}, {"freeze": None}, {"unprotected": ["a"]},
    ],
)  # fmt: skip
def test_impossible_training_is_refused(setting):
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} must be"):
        Training(**setting)


def test_weights_that_are_nan_from_the_start_are_refused():
    broken = nn.Linear(6, 3)
    nn.init.constant_(broken.weight, float("nan"))
    with pytest.raises(ValueError, match="not finite before any training"):
        fit(blobs(), SGD(), broken)


def test_rotated_mnist_for_real(real_data):
    """A shorter run of the paper's benchmark: SGD forgets, PCA-OGD less."""
    from forgetless import average_accuracy

    tasks = scenario("rotated-mnist", data=real_data, tasks=3, step_degrees=25, train_per_class=200)
    training = Training(lr=1e-2, epochs=3)
    sgd, pca = (
        average_accuracy(fit(tasks, method, training=training).accuracy)[0]
        for method in (SGD(), PCAOGD(components=50, samples=300))
    )
    assert pca > sgd + 3


def test_split_cifar_for_real(real_data):
    """Two tasks of the released protocol: convolutions and statistics stay, the rest learns."""
    from forgetless.launch.runs import resolve, run

    config = resolve(
        "split-cifar100", "pca-ogd", protocol="released", tasks=2, train_per_class=40, epochs=4,
        lr=0.01, memory=10, samples=60, eval_mode_after=5,
    )  # fmt: skip
    trace = run(config, data=real_data)
    first, last = trace.weights(0, 0), trace.weights(0, 1)
    assert torch.equal(first["convolutions.0.weight"], last["convolutions.0.weight"])
    assert torch.equal(first["body.1.running_mean"], last["body.1.running_mean"])
    assert not torch.equal(first["body.0.weight"], last["body.0.weight"])
    assert trace.state(0)["directions"].shape == (20, 3200 * 200 + 200 + 2 * 200)
    assert trace.accuracy[0, 1, 1] > 25


def test_whole_numbers_of_numpy():
    training = replace(
        TRAINING, batch_size=np.int64(8), epochs=np.int32(2), eval_mode_after=np.int64(3)
    )
    plain = replace(TRAINING, batch_size=8, epochs=2, eval_mode_after=3)
    pairs = [
        (PCAOGD(np.int64(4), 12), PCAOGD(4, 12)),
        (PCAOGD(samples=12, variance=np.float32(0.5)), PCAOGD(samples=12, variance=0.5)),
    ]
    for of_numpy, of_python in pairs:
        found = fit(blobs(), of_numpy, training=training)
        expected = fit(blobs(), of_python, training=plain)
        np.testing.assert_array_equal(found.accuracy, expected.accuracy)
    with pytest.raises(ConfigError, match="EWC's strength must be a finite number"):
        EWC(10**400)


class TrustedInPlace(InPlace):
    recordable: ClassVar[bool] = True


def test_a_state_that_is_changed_in_place_is_rejected():
    with pytest.raises(ConfigError, match=r"InPlace\.update changed its state in place"):
        fit(blobs(), InPlace(), training=TRAINING)


def test_a_checkpoint_notices_a_trusted_method_that_changes_its_state(tmp_path):
    with pytest.raises(ConfigError, match=r"TrustedInPlace\.update changed its state in place"):
        fit(blobs(), TrustedInPlace(), training=TRAINING, out=tmp_path, checkpoint_every=1e-9)


def test_inputs_of_layers_are_rows_that_their_weights_multiply():
    found = {}

    @dataclass(frozen=True)
    class Watching(InPlace):
        def update(self, g, state, view):
            return g, state

        def consolidate(self, state, view, task):
            samples = task.draw(5)
            found["rows"], found["outputs"] = view.layer_inputs(samples), view.outputs(samples)
            return state

    def network():
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 3)
        )

    trace = fit(
        blobs(tasks=1), Watching(), network, seeds=2, training=replace(TRAINING, seeds_together=2)
    )
    assert {n: tuple(r.shape) for n, r in found["rows"].items()} == {
        "1.weight": (2, 10, 4), "3.weight": (2, 5, 8),
    }  # fmt: skip
    for seed in (0, 1):
        weights = trace.weights(seed, 0)
        outputs = found["rows"]["3.weight"][seed] @ weights["3.weight"].T + weights["3.bias"]
        torch.testing.assert_close(outputs, found["outputs"][seed])
