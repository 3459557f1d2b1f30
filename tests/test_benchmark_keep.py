"""The sequence of tasks for a chat model, in tiny: every method, the choice, resuming, the page."""

import json
from dataclasses import replace
from itertools import chain

import pytest
import torch
from benchmarks import keep
from keep_data import PARTS, Prompts, Task, _of_part, _plain

from tests.llm.tiny import llama, tokenizer

PROTOCOL = replace(
    keep.QUICK, steps=3, batch=2, length=8, blocks=1, kept=4, new_tokens=4, seeds=(0, 1)
)
ONE_OF_EACH = {setting.method: setting for setting in reversed(keep.FULL.settings)}


def tasks() -> list[Task]:
    generator = torch.Generator().manual_seed(0)

    def words(n: int):
        ids = torch.randint(4, 15, (n, 8), generator=generator)
        return ids, ids

    def verdicts(n: int):
        ids, _ = words(n)
        ids[:, -1] = torch.arange(n) % 2 + 4
        labels = torch.full_like(ids, -100)
        labels[:, -1] = ids[:, -1]
        return ids, labels

    # All parts are the same: nothing else can be learned of random words.
    first, judged, last = (dict.fromkeys(PARTS, some) for some in (words(6), verdicts(6), words(6)))
    return [Task("French", first), Task("reviews", judged, (4, 5)), Task("dictionary", last)]


def world(blocks: int | None = 1, protocol=PROTOCOL) -> keep.World:
    asked = {
        "validation": {"chat": ["a cat sat"]},
        "test": {"chat": ["the dog ran", "the mat"], "code": ["a mat"]},
    }
    prompts = Prompts(["the cat", "a dog"], asked, {"the cat ?": "dog"}, ["the cat sat on the mat"])
    model = keep.with_frozen(llama(), blocks)
    return keep.world(model, tokenizer(), tasks(), prompts, protocol)


@pytest.fixture(scope="module")
def around():
    return world()


@pytest.mark.filterwarnings("ignore:the protected directions leave no room to learn")
@pytest.mark.parametrize("method", ONE_OF_EACH)
def test_every_method_learns_and_is_measured(around, method):
    setting = replace(ONE_OF_EACH[method], lr=1e-2)
    record, behaviour = keep.run(setting, 0, around)
    json.dumps(record)
    assert keep.learned(record, around.losses, "test") > 0.001
    assert [len(some) for some in record["learned"].values()] == [3, 3]
    assert {*record["kl"]} == {"validation", "chat", "code"}
    total = behaviour.kl[0] * behaviour.tokens[0] + behaviour.kl[1] * behaviour.tokens[1]
    assert record["kl"]["chat"] == pytest.approx(total / sum(behaviour.tokens[:2]), abs=1e-6)
    assert (record["bytes"] or 0) > 0 if method in keep.GUARDS else record["bytes"] is None
    # The base model, and the blocks that are not trained, are as before.
    for a, b in zip(llama().parameters(), around.base.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_frozen_blocks_made_is_what_they_make():
    setting = keep.Setting("KronOGD", 1e-2, 0.8)
    records = []
    for remembers in (True, False):
        one = world()
        if not remembers:
            one.base.model.layers[0].forward = one.base.model.layers[0]._through
        record, _ = keep.run(setting, 0, one)
        records.append({key: record[key] for key in ("losses", "learned", "kl", "right", "bytes")})
    assert records[0] == records[1]


def record_of(name: str, method: str, seed: int, kl: float, loss: float) -> dict:
    return {
        "name": name, "setting": {"method": method}, "seed": seed,
        "kl": {"validation": kl, "chat": kl}, "losses": {part: [loss, loss] for part in PARTS[1:]},
        "learned": {part: [loss - 0.5, loss] for part in PARTS[1:]},
        "text_loss": 2.0, "right": [1, 2],
        "accuracy": {"reviews": 0.5}, "bytes": None, "seconds": {"train": 1.0, "protect": 0.0},
    }  # fmt: skip


def test_the_setting_that_learns_enough_and_moves_least_is_chosen():
    base = {part: [3.0, 3.0] for part in PARTS[1:]}
    runs = [
        record_of("plain a", "plain", 0, 0.5, 2.0),
        record_of("plain b", "plain", 0, 0.4, 2.09),  # 91 % of what a learns
        record_of("plain c", "plain", 0, 0.1, 2.2),
        record_of("plain b", "plain", 1, 0.4, 2.09),
        record_of("EWC a", "EWC", 0, 0.1, 2.5),  # neither learns enough
        record_of("EWC b", "EWC", 0, 0.2, 2.4),
        {"name": "EWC c", "setting": {"method": "EWC"}, "seed": 0, "error": "diverged"},
    ]
    assert keep.chosen(runs, base, 0) == {"plain": "plain b", "EWC": "EWC b"}
    record = {
        "base": {**base, "right": [2, 2], "text_loss": 2.0, "accuracy": 0.5},
        "protocol": {"seeds": [0, 1]},
        "runs": runs,
    }
    assert json.loads(keep.as_text(record)) == record
    rows = keep.table(record).splitlines()
    assert rows[3].startswith("| plain b | 2 | 0.910 ± 0.000 | 0.4000 ± 0.0000 |")
    assert "| 0.500" in rows[4]  # of EWC's first task, forgotten


def test_runs_that_are_there_are_not_made_again():
    settings = tuple(keep.every("plain", (1e-3, 1e-4)))
    protocol = replace(PROTOCOL, settings=settings)
    record = {"base": {part: [3.0, 3.0] for part in PARTS[1:]}, "runs": []}
    made = []
    for setting, seed in keep.remaining(protocol, ["plain"], record):
        made.append((setting.lr, seed))
        loss = 2.0 if setting.lr == 1e-3 else 2.8
        record["runs"].append(record_of(setting.name, "plain", seed, 0.1, loss))
    assert made == [(1e-3, 0), (1e-4, 0), (1e-3, 1)]
    assert not [*keep.remaining(protocol, ["plain"], record)]
    assert not [*keep.remaining(protocol, ["EWC"], {**record, "runs": []})]


def test_the_page_has_all_models_of_a_folder(around, tmp_path):
    for name, lr in (("plain a", 1e-3), ("plain b", 1e-2)):
        _, behaviour = keep.run(keep.Setting("plain", lr), 0, around)
        told = keep.asdict(behaviour) | {
            "tasks": {"French": 2.0, "reviews": 1.0, "dictionary": 3.0}
        }
        stored = {"name": name, "family": "plain", "behaviour": told}
        keep.write(tmp_path / f"{name}.json", json.dumps(stored))
    found = keep.page(around, tmp_path)
    assert [*found.models] == ["base", "plain a", "plain b"]
    assert [*found.models["base"].tasks.values()] == around.losses["test"]
    assert found.families == {"plain a": "plain", "plain b": "plain"}
    assert found.models["plain b"].mean_kl == pytest.approx(behaviour.mean_kl)


def test_what_the_base_model_does_is_found_again(tmp_path, monkeypatch):
    made = world()
    monkeypatch.setattr(keep, "pretrained", lambda folder: (made.base, made.tokenizer))
    monkeypatch.setattr(keep, "with_frozen", lambda model, blocks: model)
    monkeypatch.setattr(keep.keep_data, "tasks", lambda *arguments: made.tasks)
    monkeypatch.setattr(keep.keep_data, "prompts", lambda *arguments: made.prompts)
    first = keep.prepared(tmp_path, "cpu", PROTOCOL, tmp_path / "base.pt")
    monkeypatch.delattr(keep, "pretrained")
    again = keep.prepared(tmp_path, "cpu", PROTOCOL, tmp_path / "base.pt")
    assert again.losses == first.losses
    assert again.examinations["test"].base == first.examinations["test"].base
    setting = keep.Setting("KronOGD", 1e-2)
    runs = [keep.run(setting, 0, one)[0]["losses"] for one in (first, again)]
    assert runs[0] == runs[1]
    with pytest.raises(NameError, match="pretrained"):  # of another protocol: made anew
        keep.prepared(tmp_path, "cpu", replace(PROTOCOL, steps=4), tmp_path / "base.pt")


def test_parts_have_nothing_in_common():
    parts = [_of_part(range(100), part) for part in PARTS]
    assert sorted(chain(*parts)) == [*range(100)]
    assert [len(part) for part in parts] == [74, 13, 13]


def test_a_page_is_its_words():
    text = "<html><head><title>no</title></head><body><p>A&nbsp;b <b>c</b>.</p>\n\n<p>d</p></body>"
    assert _plain(text).split() == ["A", "b", "c", ".", "d"]
