"""One table of methods, the same checks for each: what every method must do, whoever drives it."""

from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
import torch

from forgetless import (
    AGEM,
    DER,
    DERPP,
    ER,
    ERACE,
    EWC,
    GEM,
    GEMNT,
    GPM,
    OGD,
    PCAOGD,
    SGD,
    SGP,
    SI,
    AdamNSCL,
    ConfigError,
    Joint,
    KFACLaplace,
    KronEWC,
    KronOGD,
    LwF,
    Training,
    TrainingError,
    fit,
)
from forgetless.launch.runs import resolve, setting_fields
from forgetless.linalg import Layout
from forgetless.methods import METHODS, build_method, method_settings
from forgetless.methods.state import state_tensors
from forgetless.subspace import DENSE

TABLE = {
    "sgd": SGD(),
    "joint": Joint(batch_size=16),
    "ewc": EWC(strength=5.0),
    "ewc, released": EWC(strength=5.0, fisher="released"),
    "a-gem": AGEM(memory=20, batch_size=16),
    "a-gem, released": AGEM(memory=20, batch_size=16, heads="released"),
    "gem": GEM(memory=20),
    "gem, margin": GEM(memory=20, margin=0.5),
    "gem-nt": GEMNT(memory=20),
    "ogd": OGD(samples=15),
    "kron-ogd": KronOGD(energy=0.9, samples=60),
    "kron-ogd, class": KronOGD(energy=0.8, samples=60, outputs="class"),
    "kron-ogd, drift": KronOGD(samples=60),
    "kfac-laplace": KFACLaplace(samples=60),
    "kron-ewc": KronEWC(samples=60),
    "gpm": GPM(threshold=0.8, samples=60),
    "gpm, growing": GPM(threshold=0.7, growth=0.05, samples=60),
    "sgp": SGP(threshold=0.8, samples=60),
    "adam-nscl": AdamNSCL(ratio=1000.0, samples=60),
    "ewc, online": EWC(strength=5.0, decay=0.5),
    "si": SI(strength=0.1),
    "lwf": LwF(),
    "er": ER(buffer=30, batch_size=16),
    "er-ace": ERACE(buffer=30, batch_size=16),
    "der": DER(buffer=30, batch_size=16, alpha=0.1),
    "der++": DERPP(buffer=30, batch_size=16, alpha=0.1),
    "pca-ogd": PCAOGD(components=15, samples=60),
    "pca-ogd, centred": PCAOGD(components=15, samples=60, centred=True),
    "pca-ogd, by share": PCAOGD(variance=0.9, samples=60),
}
every_method = pytest.mark.parametrize("method", TABLE.values(), ids=TABLE)
TRAINING = Training(lr=0.05, epochs=3, dtype="float64")


def test_the_others_follow_the_steps_of_the_first_task():
    others = {m.name for m in TABLE.values() if not m.idle_before_first_task}
    assert others == {"si", "er", "er-ace", "der", "der++"}


def test_the_table_has_every_method():
    assert {m.name for m in TABLE.values()} == set(METHODS)


@every_method
def test_learns_and_leaves_a_whole_accuracy_matrix(method, digits):
    trace = fit(digits, method, seeds=[3], training=replace(TRAINING, lr=0.2, epochs=8))
    lower = np.tril(np.ones((3, 3), bool))
    assert np.isfinite(trace.accuracy[0][lower]).all()
    assert np.isnan(trace.accuracy[0][~lower]).all()
    assert (np.diagonal(trace.accuracy[0]) > 40).all()  # chance is 10
    assert trace.status == "complete"


@every_method
def test_heads_of_other_tasks_move_only_under_methods_that_replay_them(method, split_digits):
    trace = fit(split_digits, method, seeds=1, training=TRAINING)
    first, last = trace.weights(0, 0), trace.weights(0, 2)
    if not method.reaches_heads:
        torch.testing.assert_close(first["head.weight"][:2], last["head.weight"][:2])
    if method.name == "joint":
        assert not torch.equal(first["head.weight"][:2], last["head.weight"][:2])
    # "released" is the one that stops training heads after the first task.
    trained = not torch.equal(first["head.weight"][4:], last["head.weight"][4:])
    assert trained == (getattr(method, "heads", "own") == "own")


@every_method
def test_same_seed_same_numbers_bit_for_bit(method, digits):
    training = replace(TRAINING, epochs=1, dtype="float32")
    one, two = (fit(digits, method, seeds=[5], training=training) for _ in range(2))
    np.testing.assert_array_equal(one.accuracy, two.accuracy)
    for name, weight in one.weights(5, 2).items():
        assert torch.equal(weight, two.weights(5, 2)[name]), name


@every_method
def test_a_seed_does_not_know_which_seeds_it_ran_beside(method, digits):
    training = replace(TRAINING, epochs=1)
    alone = fit(digits, method, seeds=[4], training=training)
    beside = fit(digits, method, seeds=[1, 4, 0], training=replace(training, seeds_together=3))
    np.testing.assert_allclose(alone.accuracy[0], beside.accuracy[1])
    for name, weight in alone.weights(4, 2).items():
        torch.testing.assert_close(weight, beside.weights(4, 2)[name], atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize(
    "method", [m for m in TABLE.values() if m.idle_before_first_task], ids=lambda m: m.name
)
def test_nothing_happens_before_the_first_task_is_over(method, digits):
    """Until something is remembered, such a method is plain SGD."""
    g = torch.randn(2, 30)

    class Blind:
        """Whatever else is asked for raises: there is no memory to look at yet."""

        theta = torch.randn(2, 30)
        layout = Layout({"weight": (6, 5)})
        storage = DENSE

    state = method.init(Blind())
    step, after = method.update(g, state, Blind())
    torch.testing.assert_close(step, g)
    assert after is state
    assert state_tensors(state, 0).keys() == state_tensors(state, 1).keys()


@every_method
def test_broken_gradients_are_reported_with_the_step(method, digits):
    class Explodes(torch.nn.Module):
        """Gives NaN from its fifth training batch on."""

        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.calls.add_(1)
            return self.net(x) / (self.calls < 5)

    # Replay runs the network once more, on stored samples, from the second step on.
    step = 4 if method.needs_batch and not method.idle_before_first_task else 5
    message = f"NaN or infinite by step {step} of task 1, seed 7"
    with pytest.raises(TrainingError, match=message) as caught:
        fit(digits, method, Explodes, seeds=[7], training=TRAINING)
    remedy = f"a smaller learning rate than {TRAINING.lr:g} "
    if method.steadied_by:
        remedy += f"or a smaller strength than {method.strength:g} "
    assert str(caught.value).endswith(f"; {remedy}may help")


@every_method
def test_hyperparameters_are_frozen(method):
    for field in fields(method):
        with pytest.raises(FrozenInstanceError):
            setattr(method, field.name, 1)


@pytest.mark.parametrize("name", METHODS)
def test_built_by_name_from_options(name):
    springs = ("ewc", "laplace", "kron", "si", "lwf")
    strengths = {f"{of}_strength": 3.0 for of in springs}
    method = build_method(name, {"memory": 7, "samples": 50, **strengths})
    assert method.name == name
    kept = {"ogd": "samples", "pca-ogd": "components"}.get(name, "memory")
    assert getattr(method, kept, 7) == 7
    assert getattr(method, "strength", 3.0) == 3.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Joint(batch_size=0), "batch_size must be a whole number of at least 1, not 0"),
        (lambda: EWC(strength=-1), "strength must be a finite number of at least 0"),
        (lambda: EWC(fisher="median"), "mean or released, not 'median'"),
        (lambda: AGEM(memory=0), "memory must be a whole number of at least 1"),
        (lambda: AGEM(batch_size=0), "batch_size must be a whole number of at least 1"),
        (lambda: AGEM(heads="none"), "own or released"),
        (lambda: GEM(memory=0), "memory must be a whole number of at least 1"),
        (lambda: GEM(margin=-0.1), "margin must be a finite number of at least 0"),
        (lambda: GEMNT(memory=0), "memory must be a whole number of at least 1"),
        (lambda: OGD(samples=0), "samples must be a whole number of at least 1"),
        (lambda: PCAOGD(components=0), "components must be a whole number"),
        (lambda: PCAOGD(components=1.0), "components must be a whole number"),
        (lambda: PCAOGD(variance=1.0), "variance must be"),
        (lambda: PCAOGD(variance=0.0), "variance must be"),
        (lambda: PCAOGD(samples=0), "samples must be a whole number of at least 1"),
        (lambda: AGEM(memory=2.5), "memory must be a whole number of at least 1, not 2.5"),
        (lambda: AGEM(batch_size=True), "batch_size must be a whole number"),
        (lambda: GEMNT(memory=float("nan")), "memory must be a whole number"),
        (lambda: Joint(batch_size=1.5), "batch_size must be a whole number"),
        (lambda: OGD(samples="5"), "samples must be a whole number of at least 1, not '5'"),
        (lambda: PCAOGD(components="50"), "components must be a whole number of at least 1"),
        (lambda: PCAOGD(components=float("nan")), "components must be a whole number"),
        (lambda: PCAOGD(samples=2.5), "samples must be a whole number"),
        (lambda: EWC(strength=float("inf")), "strength must be a finite number"),
        (lambda: EWC(strength="much"), "strength must be a finite number"),
        (lambda: GEM(margin=float("inf")), "margin must be a finite number"),
        (lambda: GPM(threshold=0.0), "GPM's threshold must be a share in"),
        (lambda: GPM(threshold=1.0), "GPM's threshold must be a share in"),
        (lambda: GPM(growth=-0.1), "growth must be a finite number of at least 0"),
        (lambda: GPM(samples=0), "samples must be a whole number of at least 1"),
        (lambda: GPM(others="keep"), "freeze or train, not 'keep'"),
        (lambda: SGP(scale=-1), "SGP's scale must be a finite number of at least 0"),
        (lambda: AdamNSCL(ratio=0.5), "ratio must be a finite number of at least 1"),
        (lambda: KFACLaplace(strength=-1), "strength must be a finite number of at least 0"),
        (lambda: KronEWC(tolerance=0), "tolerance must be a positive number, not 0"),
        (lambda: EWC(decay=1.5), "decay must be a share in \\[0, 1\\], not 1.5"),
        (lambda: SI(damping=0), "SI's damping must be a positive number, not 0"),
        (lambda: LwF(temperature=0), "LwF's temperature must be a positive number, not 0"),
        (lambda: LwF(strength=-1), "strength must be a finite number of at least 0"),
        (lambda: ER(buffer=0), "ER's buffer must be a whole number of at least 1, not 0"),
        (lambda: ERACE(batch_size=0), "ER-ACE's batch_size must be a whole number of at least 1"),
        (lambda: DER(alpha=-1), "DER's alpha must be a finite number of at least 0"),
        (lambda: DERPP(beta="x"), r"DER\+\+'s beta must be a finite number of at least 0"),
        (lambda: build_method("nope", {}), "unknown method 'nope'"),
    ],
)
def test_impossible_hyperparameters_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_whole_numbers_may_be_numpys():
    assert OGD(samples=np.int64(5)).samples == PCAOGD(components=np.int32(5)).components == 5


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("sgd", set()),
        ("joint", {"joint_batch"}),
        ("ewc", {"ewc_strength", "ewc_fisher", "ewc_decay"}),
        ("a-gem", {"memory", "agem_batch", "agem_heads"}),
        ("gem", {"memory", "gem_margin"}),
        ("gem-nt", {"memory"}),
        ("ogd", {"memory", "storage", "budget"}),
        (
            "kron-ogd",
            {"energy", "drift", "shrinkage", "samples", "kron_outputs", "storage", "budget"},
        ),
        ("kfac-laplace", {"samples", "laplace_strength"}),
        (
            "gpm",
            {
                "samples",
                "without_inputs",
                "gpm_threshold",
                "gpm_layer_thresholds",
                "gpm_growth",
                "storage",
                "budget",
            },
        ),
        ("kron-ewc", {"samples", "shrinkage", "kron_strength", "tolerance"}),
        (
            "sgp",
            {
                "samples",
                "without_inputs",
                "gpm_threshold",
                "gpm_layer_thresholds",
                "gpm_growth",
                "sgp_scale",
            }
            | {"storage", "budget"},
        ),
        ("adam-nscl", {"samples", "without_inputs", "nscl_ratio", "storage", "budget"}),
        ("pca-ogd", {"memory", "variance", "samples", "centred", "storage", "budget"}),
        ("si", {"si_strength", "si_damping"}),
        ("lwf", {"lwf_strength", "lwf_temperature"}),
        ("er", {"buffer", "replay_batch"}),
        ("er-ace", {"buffer", "replay_batch"}),
        ("der", {"buffer", "replay_batch", "der_alpha"}),
        ("der++", {"buffer", "replay_batch", "der_alpha", "der_beta"}),
    ],
)
def test_settings_that_a_method_does_not_use(name, used):
    of_methods = {
        "joint_batch", "ewc_strength", "ewc_fisher", "memory", "agem_batch", "agem_heads",
        "gem_margin", "variance", "energy", "drift", "shrinkage", "kron_outputs", "samples",
        "centred", "storage", "budget", "laplace_strength", "kron_strength", "tolerance",
        "without_inputs", "gpm_threshold", "gpm_layer_thresholds", "gpm_growth", "sgp_scale",
        "nscl_ratio", "ewc_decay", "si_strength", "si_damping", "lwf_strength", "lwf_temperature",
        "buffer", "replay_batch", "der_alpha", "der_beta",
    }  # fmt: skip
    unprotected = {"unprotected"} - used if name == "sgd" else set()  # it protects nothing
    noted = set(resolve("rotated-digits", name).as_dict())
    of_all = {"classes_per_task", "validation_seed", "seeds", "device", "protocol", "heads"}
    of_all |= {"full_head", "blurry", "online"}
    of_all |= {"decay", "decay_after", "least_lr", "held_out"}  # of schedules and early stopping
    assert set(setting_fields()) - noted - of_all == of_methods - used | unprotected


def test_a_share_of_variance_replaces_the_number_of_directions():
    assert "memory" not in resolve("rotated-digits", "pca-ogd", variance=0.9).as_dict()


@every_method
def test_rebuilt_from_its_settings(method):
    assert build_method(method.name, method_settings(method)) == method
