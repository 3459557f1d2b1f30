"""The command `forgetless forecast`."""

import json

import pytest

from forgetless import load_trace
from forgetless.cli import main
from forgetless.theory import Effect
from tests.conftest import forgetless

LINEAR = ("--linearised", "--components")
QUICK = ["--tasks", "2", "--epochs", "2", "--train-per-class", "10"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run on rotated digits, one with heads, and one with a single head."""
    root = tmp_path_factory.mktemp("runs")
    single = [*QUICK, "--tasks", "1"]
    for name, options in (("rotated", QUICK), ("split", QUICK), ("single", single)):
        family = "rotated" if name == "rotated" else "split"
        arguments = ["run", f"{family}-digits", "--method", "sgd", "--seeds", "4,6", *options]
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, "--json", "--out", str(root / name)])
        assert stopped.value.code == 0
    return root


def test_a_table_for_people(trained, capsys):
    run = ["forecast", trained / "rotated", *LINEAR, "3,8"]
    status, out, _ = forgetless(run, capsys)
    assert status == 0
    for word in ("plain SGD", "PCA-OGD, 3 directions", "PCA-OGD, 8 directions", "on 15°", "Trust"):
        assert word in out


def test_a_dry_run_by_default(trained, capsys):
    run = ["forecast", trained / "rotated", "--seed", "6", "--target", "5"]
    status, out, _ = forgetless(run, capsys)
    assert status == 0
    for word in ("now", "SGD", "on 60°", "Classes most at risk", "steps at 1 times"):
        assert word in out
    status, out, _ = forgetless([*run, "--method", "ogd", "--epochs", "3", "--json"], capsys)
    assert status == 0
    result = json.loads(out)
    named = {k: result[k] for k in ("scenario", "source", "target", "seed", "method")}
    assert named == {
        "scenario": "rotated-digits", "source": 1, "target": 5, "seed": 6, "method": "ogd",
    }  # fmt: skip
    accuracy = load_trace(trained / "rotated").accuracy[1, 0, 0]
    assert result["now"]["source_accuracy"] == pytest.approx(accuracy)
    assert (result["rate"], result["of"]) == (1, 3 * -(-100 // 32))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([0.0, 10.0, 20.0], "none"),
        ([-0.5, 0.0, -20.0], "2 (-20.0), 0 (-0.5)"),
        ([-10.0, -20.0, -20.0, -1.0], "1 (-20.0), 2 (-20.0), 0 (-10.0)"),
    ],
)
def test_only_classes_that_lose_are_in_danger(changes, words, trained, capsys, monkeypatch):
    shares = {label: (80.0, 80.0 + change) for label, change in enumerate(changes)}
    monkeypatch.setattr(Effect, "by_class", lambda self: shares)
    status, out, _ = forgetless(["forecast", trained / "rotated", *LINEAR, "", "--quick"], capsys)
    assert status == 0
    assert f"Classes most at risk under plain SGD: {words}\n" in out


def test_a_forecast_that_blows_up_is_json_too(trained, capsys):
    run = [
        "forecast",
        trained / "rotated",
        "--linearised",
        "--components",
        "4",
        "--lr",
        "1e30",
        "--json",
    ]
    status, out, _ = forgetless(run, capsys)
    assert status == 0
    result = json.loads(out)
    assert result["trust"] == 0
    assert result["after"]["source_loss"] is None


def test_training_that_diverges_is_said_to(trained, capsys):
    status, _, err = forgetless(["forecast", trained / "rotated", "--lr", "1e30"], capsys)
    assert status == 1
    assert "NaN or infinite by step" in err


def test_json_for_programs(trained, capsys):
    run = ["forecast", trained / "rotated", "--seed", "6", "--source", "2", "--target", "5"]
    status, out, _ = forgetless([*run, *LINEAR, "4", "--quick", "--json"], capsys)
    assert status == 0
    result = json.loads(out)
    named = {k: result[k] for k in ("scenario", "source", "target", "seed")}
    assert named == {"scenario": "rotated-digits", "source": 2, "target": 5, "seed": 6}
    accuracy = load_trace(trained / "rotated").accuracy[1, 1, 1]
    assert result["now"]["source_accuracy"] == pytest.approx(accuracy)
    assert [o["components"] for o in result["protected"]] == [4]
    assert 0 <= result["trust"] <= 1


def test_heads_and_checkpoints(trained, capsys):
    status, out, _ = forgetless(["forecast", trained / "split", *LINEAR, "", "--json"], capsys)
    assert status == 0
    assert json.loads(out)["protected"] == []
    weights = trained / "rotated" / "seed-4" / "task-01.safetensors"
    run = [
        "forecast",
        "rotated-digits",
        "--checkpoint",
        weights,
        "--linearised",
        "--components",
        "",
        "--json",
    ]
    status, out, _ = forgetless([*run, "--epochs", "1"], capsys)
    assert status == 0
    accuracy = load_trace(trained / "rotated").accuracy[0, 0, 0]
    assert json.loads(out)["now"]["source_accuracy"] == pytest.approx(accuracy)


def test_a_run_with_a_budget_can_be_forecast(tmp_path, capsys):
    run = ["run", "rotated-digits", "--method", "ogd", "--budget", "auto", *QUICK, "--json"]
    assert forgetless([*run, "--out", tmp_path / "run"], capsys)[0] == 0
    assert "storage" in load_trace(tmp_path / "run").outcome
    command = [
        "forecast",
        tmp_path / "run",
        "--linearised",
        "--components",
        "",
        "--quick",
        "--json",
    ]
    assert forgetless(command, capsys)[0] == 0


def test_what_a_run_left_unprotected_is_not_protected_in_its_forecast(tmp_path, capsys):
    run = ["run", "rotated-digits", "--method", "pca-ogd", *QUICK, "--json", "--out"]
    found = []
    for free in ([], ["--unprotected", "body"]):
        folder = tmp_path / f"run {len(free)}"
        assert forgetless([*run, folder, *free], capsys)[0] == 0
        command = [
            "forecast",
            folder,
            "--linearised",
            "--components",
            "20",
            "--lr",
            "0.3",
            "--json",
        ]
        status, out, _ = forgetless(command, capsys)
        assert status == 0
        found.append(json.loads(out))
    # Both are the same network after the first task; with less protected, more moves.
    assert found[0]["after"] == found[1]["after"]
    losses = [one["protected"][0]["target_loss"] for one in found]
    assert losses[1] < losses[0]


def test_what_a_run_froze_is_frozen_in_its_forecast(tmp_path, capsys):
    """If only the last layer trains, the network is linear, and followed to the last digit."""
    trust = {}
    for frozen in ([], ["--freeze", "body"]):
        folder = tmp_path / f"run {len(frozen)}"
        run = ["run", "rotated-digits", "--method", "sgd", *QUICK, *frozen, "--json", "--out"]
        assert forgetless([*run, folder], capsys)[0] == 0
        command = ["forecast", folder, *LINEAR, "", "--lr", "0.3", "--json"]
        status, out, _ = forgetless(command, capsys)
        assert status == 0
        trust[bool(frozen)] = json.loads(out)["trust"]
    assert trust[True] > 0.999 > trust[False]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "holds no trace"),
        (["rotated-digits"], "add --checkpoint FILE"),
        (["RUN/rotated", "--source", "3"], "a task that the run has learned, from 1 to 2"),
        (["RUN/rotated", "--target", "1"], "another task than --source"),
        (["RUN/rotated", "--target", "0"], "--target must be a task, from 1 on, not 0"),
        (["RUN/rotated", "--seed", "5"], "--seed must be one of 4, 6"),
        (["RUN/rotated", *LINEAR, "many"], "--components must be counts"),
        (["RUN/rotated", "--components", "5"], "--components is an option of --linearised"),
        (["RUN/rotated", "--quick"], "--quick is an option of --linearised"),
        (["RUN/rotated", "--lr", "-1"], "lr must be a positive number"),
        (["RUN/split", "--target", "3"], "the run has 2 tasks"),
        (["RUN/split", "--source", "2"], "--target must be from 1 to 2, not 3"),
        (["RUN/split", "--target", "9"], "--target must be from 1 to 2, not 9"),
        (["RUN/split", "--target", "0"], "--target must be from 1 to 2, not 0"),
        (["RUN/single"], "the run has 1 task and its network no outputs for others"),
        (["split-digits", "--checkpoint", "WEIGHTS", "--target", "6"], "split-digits has 5 tasks"),
        (["split-digits", "--checkpoint", "WEIGHTS"], "the weights do not fit"),
        (["rotated-digits", "--checkpoint", "nowhere"], "--checkpoint nowhere cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(trained, arguments, sentence, capsys):
    weights = trained / "split" / "seed-4" / "task-01.safetensors"
    filled = [a.replace("RUN", str(trained)).replace("WEIGHTS", str(weights)) for a in arguments]
    status, out, err = forgetless(["forecast", *filled], capsys)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert sentence in err


MINE = '''
from dataclasses import dataclass

from forgetless.methods import Method, option


@dataclass(frozen=True)
class Slow(Method):
    """A part of every step."""

    name = "slow"
    acts_on = "gradient"
    share: float = option(1.0, "Share of a step.")

    def init(self, view):
        return None

    def update(self, g, state, view):
        return self.share * g, state

    def consolidate(self, state, view, task):
        return state
'''


def test_other_methods_and_ones_own(trained, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(MINE, "utf-8")
    run = [
        "forecast",
        trained / "rotated",
        "--linearised",
        "--components",
        "",
        "--source",
        "2",
        "--target",
        "3",
    ]
    results = {}
    for name, options in {
        "slow": ["--method", f"{file}:Slow", "--set", "share=0.5"],
        "half": ["--lr", "0.005"],
        "full": ["--lr", "0.01"],
        "OGD": ["--method", "ogd"],
    }.items():
        status, out, _ = forgetless([*run, "--lr", "0.01", *options, "--json"], capsys)
        assert status == 0
        results[name] = json.loads(out)
    slow = results["slow"]["methods"]["slow"]["source_loss"]
    assert slow == pytest.approx(results["half"]["after"]["source_loss"], rel=1e-4)
    assert slow != pytest.approx(results["full"]["after"]["source_loss"], rel=1e-3)
    found = results["OGD"]
    states = (found["now"], found["after"], found["methods"]["OGD"])
    now, plain, ogd = (state["source_loss"] for state in states)
    assert abs(ogd - now) < 0.5 * abs(plain - now)  # protected, the source moves less
    status, out, _ = forgetless([*run, "--method", "ogd"], capsys)
    assert status == 0
    assert "OGD" in out
    status, _, err = forgetless([*run, "--set", "share=0.5"], capsys)
    assert status == 2
    assert "--set must be an option of --method" in err


@pytest.mark.parametrize(
    ("name", "value"), [("optimizer", "adam"), ("schedule", "cosine"), ("augmentation", "crop")]
)
def test_a_run_of_other_training_asks_for_the_learning_rate_of_sgd(name, value, tmp_path, capsys):
    run = ["run", "rotated-digits", "--method", "sgd", *QUICK, f"--{name}", value, "--json"]
    model = ["--model", "lenet"] if name == "augmentation" else []
    assert forgetless([*run, *model, "--out", tmp_path / "run"], capsys)[0] == 0
    command = ["forecast", tmp_path / "run", *LINEAR, "", "--json"]
    status, _, err = forgetless(command, capsys)
    assert status == 2
    assert "choose the learning rate of SGD with --lr, or leave out --linearised" in err
    status, _, err = forgetless([*command, "--lr", "0.01"], capsys)
    assert status == 0
    assert f"the run was trained with {name} {value}\n" in err
