"""The sentence at the top, and the commands."""

import shlex

import numpy as np
import pytest

from forgetless.launch.runs import resolve
from forgetless.report.comparison import compare
from forgetless.report.page import command_line, headline, worst_task
from forgetless.trace import Trace


def run(method: str, rows: list[list[float]], tasks: int | None = None) -> Trace:
    tasks = tasks or len(rows)
    matrix = np.full((1, tasks, tasks), np.nan)
    for t, row in enumerate(rows):
        matrix[0, t, : len(row)] = row
    names = tuple(f"task {t + 1}" for t in range(tasks))
    return Trace("digits", method, (0,), names, matrix, status="complete")


BAD = [[95], [90, 96], [40, 90, 97], [35, 80, 90, 98]]
GOOD = [[95], [94, 96], [93, 95, 97], [92, 94, 96, 98]]


def say(*traces: Trace) -> str:
    return headline(compare(traces)[0])


def test_who_kept_what_and_when_it_was_lost():
    # F_T of the bad run is (60 + 16 + 7) / 3, of the good one (3 + 2 + 1) / 3.
    assert say(run("sgd", BAD), run("pca-ogd", GOOD)) == (
        "PCA-OGD kept 25.7 points that SGD lost; task 1 suffered most, between tasks 2 and 3."
    )


def test_joint_training_is_no_rival():
    assert "OGD kept" in say(run("sgd", BAD), run("joint", GOOD), run("ogd", BAD[:3] + GOOD[3:]))


def test_one_run():
    assert say(run("sgd", BAD)) == (
        "SGD forgot 27.7 points on average and ended at 75.8 %; "
        "task 1 suffered most, between tasks 2 and 3."
    )
    assert say(run("sgd", [[95.0]])) == (
        "SGD learned one task to 95.0 %; there was nothing to forget yet."
    )
    assert say(run("replay", [[90], [91, 92]])).endswith("ended at 91.5 %, and no task suffered.")


def test_runs_that_did_not_get_far():
    assert say(run("sgd", BAD[:2], tasks=5)).endswith("The runs stopped after 2 of 5 tasks.")
    assert say(run("sgd", [], tasks=2)).startswith("No task was learned to its end")


def test_when_nothing_helped():
    assert say(run("sgd", GOOD), run("ewc", BAD)).startswith("No method did better than SGD")


def test_a_method_is_compared_with_a_run_trained_as_it_was():
    plain, adam, ogd = run("sgd", BAD), run("sgd", [*BAD[:3], [60, 80, 92, 98]]), run("ogd", GOOD)
    for trace, optimizer in ((plain, "sgd"), (adam, "adamw"), (ogd, "adamw")):
        trace.config |= {"optimizer": optimizer, "lr": 0.01}
    # F_T of the run with AdamW is (35 + 16 + 5) / 3, of OGD (3 + 2 + 1) / 3.
    kept = "OGD kept 16.7 points that SGD, optimizer adamw lost"
    assert say(plain, adam, ogd).startswith(kept)
    assert say(adam, plain, ogd).startswith(kept)
    assert say(plain, ogd, run("joint", GOOD)).startswith("OGD ended highest")
    for others in ([plain], [plain, run("ewc", BAD)]):
        assert say(*others, ogd).startswith(
            "OGD ended highest, at 95.0 %, but no plain run has its settings of training, so how "
            "much it owes to them is unknown; task 1 suffered most"
        )
    best, plain.fingerprint["model"] = run("ogd", GOOD), "another"
    best.config |= plain.config
    best.fingerprint["model"] = "one"
    assert "but no plain run has its settings" in say(plain, best)


def test_methods_alone_are_compared_with_each_other():
    runs = [run("ogd", GOOD), run("ewc", BAD), run("gem", [*BAD[:3], [60, 80, 92, 98]])]
    assert say(*runs).startswith("OGD kept 25.7 points that EWC lost")
    two = [run("sgd", GOOD), run("sgd", BAD)]
    for trace, lr in zip(two, (0.1, 0.2), strict=True):
        trace.config["lr"] = lr
    assert say(*two).startswith("Best was SGD, lr 0.1, at 95.0 %; task 1 suffered most")


def test_validation_accuracy_is_called_so():
    runs = [run("sgd", BAD), run("ogd", GOOD)]
    assert "validation" not in say(*runs)
    for trace in runs:
        trace.config["validation_per_class"] = 10
    assert say(*runs).endswith("between tasks 2 and 3. This is validation accuracy.")


def test_a_very_long_name_does_not_flood_the_sentence():
    assert len(say(run("m" * 300, BAD))) < 200


def test_the_worst_stretch_is_the_shortest_that_holds_most_of_the_loss():
    entry = compare([run("sgd", BAD)])[0].entries[0]
    assert worst_task(entry) == (0, 60.0, 1, 2)
    assert worst_task(compare([run("sgd", GOOD[:1])])[0].entries[0]) is None


def test_a_command_gives_the_settings_back():
    config = resolve("rotated-digits", "pca-ogd", tasks=3, lr=0.1, centred=True)
    words = shlex.split(command_line(config.as_dict(), seeds="3,7"))
    assert words[:5] == ["forgetless", "run", "rotated-digits", "--method", "pca-ogd"]
    rest = words[5:]
    assert "--centred" in rest
    rest.remove("--centred")
    given = dict(zip(rest[::2], rest[1::2], strict=True))
    assert given == {"--tasks": "3", "--lr": "0.1", "--seeds": "3,7"}
    other = command_line(config.as_dict(), method="gem", memory=7, tasks=5, seeds="3,7")
    assert other == ("forgetless run rotated-digits --method gem --memory 7 --lr 0.1 --seeds 3,7")


def test_a_command_has_only_what_its_method_uses():
    config = resolve("split-digits", "sgd", memory=7, step_degrees=30.0).as_dict()
    assert command_line(config) == "forgetless run split-digits --method sgd"
    protected = command_line(config, method="pca-ogd", variance=0.95)
    assert protected == "forgetless run split-digits --method pca-ogd --variance 0.95"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"scenario": "x", "method": "sgd"},
        {"scenario": "rotated-digits", "method": "sgd", "model_from": "as given"},
    ],
)
def test_a_run_that_a_script_made_has_no_command(config):
    assert command_line(config) is None
