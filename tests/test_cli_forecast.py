"""The command `forgetless forecast`."""

import json

import pytest

from forgetless import load_trace
from forgetless.cli import main
from tests.conftest import forgetless

QUICK = ["--tasks", "2", "--epochs", "2", "--train-per-class", "10"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run on rotated digits, and one with heads."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("rotated", "split"):
        arguments = ["run", f"{name}-digits", "--method", "sgd", "--seeds", "4,6", *QUICK]
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, "--json", "--out", str(root / name)])
        assert stopped.value.code == 0
    return root


def test_a_table_for_people(trained, capsys):
    run = ["forecast", trained / "rotated", "--components", "3,8"]
    status, out, _ = forgetless(run, capsys)
    assert status == 0
    for word in ("plain SGD", "PCA-OGD, 3 directions", "PCA-OGD, 8 directions", "on 15°", "Trust"):
        assert word in out


def test_json_for_programs(trained, capsys):
    run = ["forecast", trained / "rotated", "--seed", "6", "--source", "2", "--target", "5"]
    status, out, _ = forgetless([*run, "--components", "4", "--quick", "--json"], capsys)
    assert status == 0
    result = json.loads(out)
    named = {k: result[k] for k in ("scenario", "source", "target", "seed")}
    assert named == {"scenario": "rotated-digits", "source": 2, "target": 5, "seed": 6}
    accuracy = load_trace(trained / "rotated").accuracy[1, 1, 1]
    assert result["now"]["source_accuracy"] == pytest.approx(accuracy)
    assert [o["components"] for o in result["protected"]] == [4]
    assert 0 <= result["trust"] <= 1


def test_heads_and_checkpoints(trained, capsys):
    status, out, _ = forgetless(
        ["forecast", trained / "split", "--components", "", "--json"], capsys
    )
    assert status == 0
    assert json.loads(out)["protected"] == []
    weights = trained / "rotated" / "seed-4" / "task-01.safetensors"
    run = ["forecast", "rotated-digits", "--checkpoint", weights, "--components", "", "--json"]
    status, out, _ = forgetless([*run, "--epochs", "1"], capsys)
    assert status == 0
    accuracy = load_trace(trained / "rotated").accuracy[0, 0, 0]
    assert json.loads(out)["now"]["source_accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "holds no trace"),
        (["rotated-digits"], "add --checkpoint FILE"),
        (["RUN/rotated", "--source", "3"], "a task that the run has learned, from 1 to 2"),
        (["RUN/rotated", "--target", "1"], "another task than --source"),
        (["RUN/rotated", "--target", "0"], "--target must be from 1"),
        (["RUN/rotated", "--seed", "5"], "--seed must be one of 4, 6"),
        (["RUN/rotated", "--components", "many"], "--components must be counts"),
        (["RUN/rotated", "--lr", "-1"], "lr must be a positive number"),
        (["RUN/split", "--target", "4"], "the weights do not fit"),
        (["RUN/split", "--target", "9"], "need 18 classes"),
        (["rotated-digits", "--checkpoint", "nowhere"], "--checkpoint nowhere cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(trained, arguments, sentence, capsys):
    filled = [a.replace("RUN", str(trained)) for a in arguments]
    status, out, err = forgetless(["forecast", *filled], capsys)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert sentence in err
