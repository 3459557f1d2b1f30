"""Checkpoints that are cut, changed or foreign: named in a sentence, and the one before is used."""

import hashlib
import json
from contextlib import nullcontext

import pytest
import torch

from forgetless import TraceError
from forgetless.support.validation import ForgetlessWarning
from forgetless.trace.checkpoint import Store

from .problems import Plug, assert_same, small_run, stopped_run


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """The folder of a run that was stopped in its second task, a checkpoint after every step."""
    stopped_run(tmp_path / "a", Plug(monkeypatch), 14)
    return tmp_path / "a"


def newest(folder, pattern):
    return max((folder / "checkpoint").glob(pattern))


def resealed(file, **changes) -> None:
    """Change a manifest and set its checksum right."""
    body = json.loads(file.read_text())["manifest"] | changes
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    file.write_text(json.dumps({"blake2b": hashlib.blake2b(text).hexdigest(), "manifest": body}))


def cut(file) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(file) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 0x10
    file.write_bytes(content)


DAMAGE = {
    "part cut": ("part-*-progress*", cut, "is cut short"),
    "part emptied": ("part-*-progress*", lambda f: f.write_bytes(b""), "is cut short: 0 bytes"),
    "part gone": ("part-*-progress*", lambda f: f.unlink(), "cannot be read: No such file"),
    "bit flipped": ("part-*-progress*", flipped, "is damaged: its checksum differs"),
    "memory flipped": ("part-*-memory*", flipped, "is damaged: its checksum differs"),
    "manifest cut": ("manifest-*", cut, "is cut short or damaged"),
    "manifest flipped": ("manifest-*", flipped, "damaged"),
    "manifest a list": ("manifest-*", lambda f: f.write_text("[1]"), "is cut short or damaged"),
    "another version's": ("manifest-*", lambda f: resealed(f, format=9), "has format 9, and this"),
    "a path out": (
        "manifest-*",
        lambda f: resealed(f, parts={"progress": {"file": "../x", "bytes": 1, "blake2b": ""}}),
        "is not a checkpoint: '../x' is not a part",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_checkpoint_before_a_damaged_one_is_used(damage, stopped):
    pattern, spoil, message = DAMAGE[damage]
    spoil(newest(stopped, pattern))
    with pytest.warns(ForgetlessWarning, match=f"{message}.*resumes from the checkpoint before it"):
        found = small_run(stopped)
    assert_same(found, small_run(None))


@pytest.mark.parametrize("damage", DAMAGE)
def test_with_no_good_one_left_it_says_so_and_touches_nothing(damage, stopped):
    pattern, spoil, message = DAMAGE[damage]
    for file in (stopped / "checkpoint").glob(pattern):
        spoil(file)
    before = {f: f.read_bytes() for f in stopped.rglob("*") if f.is_file()}
    with pytest.raises(TraceError, match=f"{message}.*--overwrite starts anew") as caught:
        small_run(stopped)
    assert "\n" not in str(caught.value)
    assert {f: f.read_bytes() for f in stopped.rglob("*") if f.is_file()} == before
    assert_same(small_run(stopped, overwrite=True), small_run(None))


def test_no_single_file_is_needed_by_all_checkpoints(stopped):
    """Also in the middle of a task, where the latest ones share what the method remembers."""
    files = sorted(f for f in (stopped / "checkpoint").iterdir())
    assert len(files) == 3 + 3 + 2  # manifests, progress, memory
    for file in files:
        content = file.read_bytes()
        flipped(file)
        with pytest.warns(ForgetlessWarning) if _is_newest(file, files) else nullcontext():
            assert Store(stopped / "checkpoint").read() is not None
        file.write_bytes(content)


def _is_newest(file, files) -> bool:
    kinds = [f for f in files if f.name.split("-")[-1] == file.name.split("-")[-1]]
    if file.name.startswith("manifest"):
        kinds = [f for f in files if f.name.startswith("manifest")]
    return file == kinds[-1]


def test_a_checkpoint_with_right_checksums_and_wrong_content_is_refused(stopped):
    """Whoever can write checksums can write anything: still no more than a refusal."""
    for file in (stopped / "checkpoint").glob("manifest-*"):
        body = json.loads(file.read_text())["manifest"]
        resealed(file, learner=body["learner"] | {"steps": "many"})
    with pytest.raises(TraceError, match="does not fit this run: ValueError"):
        small_run(stopped)


def test_what_is_written_can_be_read_and_is_aligned_anew(tmp_path):
    store = Store(tmp_path / "c")
    tensors = {"b": torch.arange(3), "a": torch.rand(5)[::2], "none": torch.empty(0, 4)}
    store.write({"x": [1, None, "é"]}, {"progress": tensors, "memory": {}})
    store.write({"x": 2}, {"progress": tensors, "memory": None})
    found = Store(tmp_path / "c").read()
    assert found.body["x"] == 2
    assert found.parts["memory"] == {}
    for name, tensor in tensors.items():
        assert torch.equal(found.parts["progress"][name], tensor)
        assert found.parts["progress"][name].data_ptr() % 16 == 0


def test_removing_leaves_other_files_alone(tmp_path):
    store = Store(tmp_path / "c")
    store.write({}, {"progress": {"a": torch.ones(1)}})
    (tmp_path / "c" / "notes.txt").write_text("mine")
    store.remove()
    assert [f.name for f in (tmp_path / "c").iterdir()] == ["notes.txt"]
