"""What protecting a model on disk will cost, from its configuration alone."""

import json

import pytest
import torch

from forgetless import DataError, Guard
from forgetless.guard import Estimate
from forgetless.llm import estimate
from forgetless.support.validation import ConfigError
from tests.conftest import forgetless
from tests.llm.tiny import WORDS, llama


@pytest.fixture
def saved(tmp_path):
    llama().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("exclude", [(), ("model.embed_tokens", "lm_head")])
def test_bytes_are_those_that_the_guard_takes(saved, exclude):
    (saved / "model.safetensors").unlink()  # no weight is read
    found = estimate(saved, samples=20, tokens=12, exclude=exclude)
    assert isinstance(found, Estimate)
    model = llama()
    ids = torch.randint(len(WORDS), (20, 12))
    with Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), exclude=exclude) as guard:
        guard.protect({"input_ids": ids, "labels": ids})
        assert found.bytes == (guard.memory_report().bytes,) * 2
    assert 0 < found.seconds < 60
    assert found.step_seconds > 0


def test_more_tokens_take_more_time(saved):
    few, many = (estimate(saved, samples=64, tokens=t).seconds for t in (4, 30))
    assert few < many


def test_a_quantised_model_is_estimated_as_it_is_trained(saved):
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    plain = estimate(saved, samples=2, tokens=4).bytes
    (saved / "config.json").write_text(json.dumps(config))
    assert estimate(saved, samples=2, tokens=4).bytes == plain


def test_the_command(saved, capsys):
    status, out, _ = forgetless(["estimate", saved, "--tokens", "8", "--samples", "5"], capsys)
    assert status == 0
    assert "after the task" in out
    status, less, _ = forgetless(["estimate", saved, "--exclude", "model"], capsys)
    assert status == 0
    assert less != out


def test_what_is_no_model(tmp_path, saved, capsys):
    with pytest.raises(DataError, match="does not exist"):
        estimate(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no language model that transformers can read"):
        estimate(tmp_path / "empty")
    with pytest.raises(ConfigError, match="tokens must be"):
        estimate(saved, tokens=1)
    status, _, err = forgetless(["estimate", tmp_path / "nowhere"], capsys)
    assert status == 2
    assert "does not exist" in err
