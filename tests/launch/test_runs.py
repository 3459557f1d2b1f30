"""Settings: defaults, presets, protocols, and how they override each other."""

import pytest

from forgetless import ConfigError
from forgetless.launch.runs import (
    PRESETS,
    RELEASED,
    describe_default,
    refuse_unused,
    resolve,
    setting_fields,
)


def test_the_papers_settings_are_the_presets():
    rotated = resolve("rotated-mnist", "pca-ogd")
    assert (rotated.tasks, rotated.step_degrees, rotated.train_per_class) == (15, 5.0, 1000)
    assert (rotated.epochs, rotated.batch_size, rotated.lr) == (10, 32, 1e-3)
    assert (rotated.options["memory"], rotated.options["samples"]) == (100, 3000)
    assert resolve("rotated-mnist", "a-gem").options["agem_batch"] == 256
    assert (rotated.model, rotated.hidden) == ("mlp", 100)
    split = resolve("split-mnist", "sgd")
    assert (split.tasks, split.classes_per_task, split.epochs) == (5, 2, 5)
    cifar = resolve("split-cifar100", "ewc")
    assert (cifar.tasks, cifar.classes_per_task, cifar.epochs, cifar.train_per_class) == (
        20,
        5,
        50,
        0,
    )
    assert (cifar.model, cifar.hidden, cifar.options["ewc_strength"]) == ("lenet", 200, 25)
    assert resolve("split-cifar100", "pca-ogd").options["samples"] == 2500


def test_the_released_protocol_is_a_bundle_of_named_options():
    def options(method, **given):
        return resolve("split-cifar100", method, **given).options

    assert options("pca-ogd", protocol="released")["centred"]
    assert options("ewc", protocol="released")["ewc_fisher"] == "released"
    assert options("a-gem", protocol="released")["agem_heads"] == "released"
    config = resolve("split-cifar100", "sgd", protocol="released")
    assert (config.freeze, config.eval_mode_after) == ("convolutions", 1000)
    assert not options("pca-ogd")["centred"]
    assert options("ewc")["ewc_fisher"] == "mean"
    assert options("a-gem")["agem_heads"] == "own"
    assert resolve("split-cifar100", "sgd").freeze == ""


def test_what_is_given_wins():
    config = resolve(
        "rotated-mnist", "pca-ogd", protocol="released", epochs=2, centred=False, tasks=None
    )
    assert config.epochs == 2
    assert not config.options["centred"]
    assert config.tasks == 15


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("5", (0, 1, 2, 3, 4)), ("1", (0,)), ("3,7", (3, 7)), ("4,", (4,)), (" 2 , 0 ", (2, 0))],
)
def test_seeds_are_a_count_or_a_list(text, seeds):
    assert resolve("rotated-digits", "sgd", seeds=text).seed_list() == seeds


@pytest.mark.parametrize("text", ["0", "", "x", "1,1", "-1", "1.5", "1;2", "²", "99999999999,1"])
def test_other_seeds_are_refused(text):
    with pytest.raises(ConfigError, match="--seeds must be"):
        resolve("rotated-digits", "sgd", seeds=text).seed_list()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("rotated-dogs", "sgd", {}),
            "unknown scenario 'rotated-dogs': did you mean 'rotated-digits'.*There are",
        ),
        (
            ("rotated-digits", "adam", {}),
            "unknown method 'adam': did you mean 'adam-nscl'. There are sgd",
        ),
        (("rotated-digits", "sgd", {"speed": 1}), "unknown setting 'speed'"),
        (
            ("rotated-digits", "sgd", {"protocol": "mine"}),
            "--protocol must be corrected or released",
        ),
        (("rotated-digits", "sgd", {"ewc_fisher": "x"}), "--ewc-fisher must be mean or released"),
        (("rotated-digits", "sgd", {"hidden": 2.5}), "--hidden must be a whole number"),
        (("rotated-digits", "ogd", {"memory": 2.5}), "--memory must be a whole number"),
        (("rotated-digits", "ewc", {"ewc_strength": -1.0}), "--ewc-strength must be a finite"),
    ],
)
def test_unknown_names_are_refused(arguments, message):
    scenario, method, given = arguments
    with pytest.raises(ConfigError, match=message):
        resolve(scenario, method, **given)


def test_every_setting_has_help_and_presets_only_name_settings():
    settings = setting_fields()
    for name, of in settings.items():
        if name not in ("scenario", "method"):
            assert all(field.metadata["help"].endswith(".") for field in of.values()), name
    for _, preset in PRESETS + RELEASED:
        assert set(preset) <= set(settings)


def test_defaults_are_described_with_their_exceptions():
    assert describe_default("epochs") == "10, 5 for split-*mnist, 50 for *-cifar100"
    assert describe_default("centred") == "no, yes with --protocol released"
    assert describe_default("variance") == "none"


def test_a_setting_that_one_of_several_methods_uses_is_not_refused():
    given = {"memory": 5, "variance": None, "storage": "factored"}
    methods = {name: resolve("rotated-digits", name, **given) for name in ("sgd", "gem", "ogd")}
    refuse_unused(list(methods.values()), given)
    with pytest.raises(ConfigError, match="sgd, gem do not use --storage"):
        refuse_unused([methods["sgd"], methods["gem"]], given)
