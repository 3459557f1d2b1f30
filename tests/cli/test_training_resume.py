"""The same command again: it goes on, skips what is complete, and replaces nothing unasked."""

import json
from contextlib import ExitStack

import pytest

from forgetless import load_trace
from forgetless.launch import runs
from forgetless.support.files import FolderLock
from forgetless.trace.checkpoint import checksum
from forgetless.training.learner import Learner
from tests.conftest import forgetless

pytestmark = pytest.mark.usefixtures("elsewhere")
QUICK = ["--tasks", "2", "--epochs", "1", "--train-per-class", "10", "--memory", "5", "--json"]
RUN = ["run", "rotated-digits", "--method", "ogd", *QUICK]
COMPARE = ["compare", "rotated-digits", "--methods", "sgd,ogd,a-gem", *QUICK]


@pytest.fixture
def stopping(monkeypatch):
    """Lets commands be interrupted at the n-th consolidation."""
    plain, left = Learner.consolidate, [-1]

    def consolidate(self, split, task):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        plain(self, split, task)

    monkeypatch.setattr(Learner, "consolidate", consolidate)
    return left


def results(out):
    """What a command printed, without what may differ."""
    found = json.loads(out)
    for one in found if isinstance(found, list) else [found]:
        del one["seconds"], one["out"]
    return found


@pytest.mark.parametrize("command", [RUN, COMPARE], ids=["run", "compare"])
@pytest.mark.parametrize("out", [[], ["--out", "mine"]], ids=["default folder", "--out"])
def test_the_same_command_goes_on(command, out, stopping, capsys, tmp_path):
    _, printed, _ = forgetless([*command, "--out", "whole"], capsys)
    expected = results(printed)
    stopping[0] = 2 if command is RUN else 4
    status, _, err = forgetless([*command, *out], capsys)
    assert (status, err.count("\n")) == (130, 1)
    status, printed, err = forgetless([*command, *out], capsys)
    assert (status, err) == (0, "")
    assert results(printed) == expected
    assert len(list(tmp_path.glob("runs/*"))) == (0 if out else 1)


def test_compare_does_not_run_again_what_is_complete(stopping, capsys, tmp_path):
    stopping[0] = 4
    forgetless([*COMPARE, "--out", "a"], capsys)
    before = (tmp_path / "a" / "sgd" / "trace.json").stat().st_mtime_ns
    assert forgetless([*COMPARE, "--out", "a"], capsys)[0] == 0
    assert (tmp_path / "a" / "sgd" / "trace.json").stat().st_mtime_ns == before
    assert load_trace(tmp_path / "a" / "a-gem").status == "complete"


@pytest.mark.parametrize("command", [RUN, COMPARE], ids=["run", "compare"])
def test_a_complete_run_is_said_to_be_and_shown_if_asked(command, capsys, tmp_path):
    _, expected, _ = forgetless([*command, "--out", "a"], capsys)
    before = {f: f.read_bytes() for f in tmp_path.rglob("*.safetensors")}
    status, out, err = forgetless([*command, "--out", "a"], capsys)
    assert (status, out) == (2, "")
    assert "holds this run, complete; --resume shows its results, --overwrite" in err
    status, out, _ = forgetless([*command, "--out", "a", "--resume"], capsys)
    assert (status, out) == (0, expected)
    assert {f: f.read_bytes() for f in tmp_path.rglob("*.safetensors")} == before


def test_other_settings_are_refused_until_overwriting_is_asked_for(stopping, capsys, tmp_path):
    stopping[0] = 2
    forgetless([*RUN, "--out", "a"], capsys)
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    other = [*RUN, "--lr", "0.01", "--out", "a"]
    status, _, err = forgetless(other, capsys)
    assert (status, err.count("\n")) == (2, 1)
    assert "holds another run: lr is 0.05 there and 0.01 here" in err
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before
    assert forgetless([*other, "--overwrite"], capsys)[0] == 0
    assert not (tmp_path / "a" / "checkpoint").exists()


def test_a_folder_with_nothing_but_a_checkpoint_is_a_run(stopping, capsys, tmp_path):
    """Stopped in the first task: there is no trace yet."""
    stopping[0] = 1
    forgetless([*RUN, "--out", "a", "--checkpoint-every", "1e-9"], capsys)
    assert [f.name for f in (tmp_path / "a").iterdir()] == ["checkpoint"]
    assert forgetless([*RUN, "--out", "a"], capsys)[0] == 0


def test_a_damaged_checkpoint_is_one_sentence_and_the_run_goes_on(stopping, capsys, tmp_path):
    stopping[0] = 2
    forgetless([*RUN, "--out", "a", "--checkpoint-every", "1e-9"], capsys)
    newest = max((tmp_path / "a" / "checkpoint").glob("*progress*"))
    newest.write_bytes(newest.read_bytes()[:-5])
    status, _, err = forgetless([*RUN, "--out", "a"], capsys)
    assert (status, err.count("\n")) == (0, 1)
    assert err.startswith("forgetless: ")
    assert "is cut short" in err
    assert "from the checkpoint before it" in err


def test_a_folder_that_is_being_written_is_not_taken(stopping, capsys, tmp_path):
    stopping[0] = 2
    forgetless(RUN, capsys)
    folder = tmp_path / "runs" / "rotated-digits-ogd"
    with FolderLock(folder):
        status, _, err = forgetless([*RUN, "--out", folder], capsys)
        assert status == 2
        assert "is being written by process" in err
        status, out, _ = forgetless(RUN, capsys)
    assert json.loads(out)["out"].endswith("rotated-digits-ogd-2")


def test_a_folder_whose_run_ends_while_it_is_looked_at_is_not_taken(
    stopping, capsys, tmp_path, monkeypatch
):
    stopping[0] = 2
    forgetless(RUN, capsys)
    plain = runs.status_of
    with ExitStack() as locked:
        locked.enter_context(FolderLock(tmp_path / "runs" / "rotated-digits-ogd"))

        def status_of(*arguments):
            found = plain(*arguments)
            locked.close()
            return found

        monkeypatch.setattr(runs, "status_of", status_of)
        status, out, _ = forgetless(RUN, capsys)
    assert status == 0
    assert json.loads(out)["out"].endswith("rotated-digits-ogd-2")


def test_a_broken_trace_is_named_and_stops_no_other_run(capsys, tmp_path):
    assert forgetless(RUN, capsys)[0] == 0
    broken = tmp_path / "runs" / "rotated-digits-ogd" / "trace.json"
    broken.write_text("{")
    status, out, err = forgetless(RUN, capsys)
    assert (status, err.count("\n")) == (0, 1)
    assert "rotated-digits-ogd/trace.json is not a trace" in err
    assert json.loads(out)["out"].endswith("rotated-digits-ogd-2")
    status, _, err = forgetless([*RUN, "--out", broken.parent], capsys)
    assert (status, err.count("\n")) == (2, 1)
    assert err.endswith("choose another folder or add --overwrite\n")
    assert broken.read_text() == "{"
    assert forgetless([*RUN, "--out", broken.parent, "--overwrite"], capsys)[0] == 0


@pytest.mark.parametrize("minutes", ["-1", "nan", "inf"])
def test_minutes_are_a_number(minutes, capsys):
    status, _, err = forgetless([*RUN, "--checkpoint-every", minutes], capsys)
    assert status == 2
    assert "--checkpoint-every must be a number of minutes" in err


def test_a_run_of_a_version_with_fewer_settings_goes_on(stopping, capsys, tmp_path):
    """As if `--unprotected` had come after it was begun."""
    stopping[0] = 2
    assert forgetless([*RUN, "--out", "a"], capsys)[0] == 130
    manifests = list(tmp_path.glob("a/checkpoint/manifest-*.json"))
    assert manifests
    for file in manifests:
        manifest = json.loads(file.read_text("utf-8"))["manifest"]
        del manifest["settings"]["unprotected"]
        file.write_text(json.dumps({"blake2b": checksum(manifest), "manifest": manifest}), "utf-8")
    status, _, err = forgetless([*RUN, "--out", "a"], capsys)
    assert (status, err) == (0, "")


def test_names_of_parameters_of_complete_runs_are_not_checked_again(capsys, monkeypatch):
    """Their data need not be there any more."""
    command = [*COMPARE, "--freeze", "body.1", "--out", "a"]
    assert forgetless(command, capsys)[0] == 0

    def refuse(*args):
        raise AssertionError

    monkeypatch.setattr(runs, "make_learner", refuse)
    assert forgetless([*command, "--resume"], capsys)[0] == 0
    assert forgetless([*command, "--overwrite"], capsys)[0] == 3  # stopped by `refuse`
