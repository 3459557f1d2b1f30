"""A language model's own answers: what it does now, as data that a guard can protect."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forgetless.llm.prompts import check_pair, checked_prompts, encoded_prompts, equal_lengths
from forgetless.support.files import write_atomically
from forgetless.support.progress import advance, bar_on_terminal
from forgetless.support.provenance import digest_of
from forgetless.support.validation import ConfigError, DataError, first_line, whole
from forgetless.tangent import eval_mode

_FORMAT = 1
_IGNORED = -100  # the label that transformers' losses leave out


@final
@dataclass(frozen=True)
class Answer:
    """A prompt and what a model says to it.

    Arguments:
        prompt: the text.
        text: the answer, without special tokens.
        tokens: of the prompt, as the model sees it, and of the answer.
        start: how many tokens are the prompt's.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    start: int


@final
class OwnAnswers(list[dict[str, Tensor]]):
    """Batches of prompts with answers: `input_ids`, `attention_mask` and `labels`, (n, T) each.

    The labels of a prompt's tokens are −100, so that only the answer's count. The sequences of a
    batch have one length, and none is padded.

    Arguments:
        answers: in the order of the prompts.
        batch_size: the most sequences in a batch.

    Attributes:
        answers: as given.
        numbers: for each batch the places of its sequences in `answers`.
    """

    def __init__(self, answers: Sequence[Answer], batch_size: int = 8) -> None:
        super().__init__()
        self.answers = tuple(answers)
        self.numbers: list[list[int]] = []
        starts = torch.tensor([answer.start for answer in answers])
        for numbers, tokens in equal_lengths([answer.tokens for answer in answers], batch_size):
            is_prompt = torch.arange(tokens.shape[1]) < starts[numbers].unsqueeze(1)
            labels = tokens.masked_fill(is_prompt, _IGNORED)
            mask = torch.ones_like(tokens)
            self.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
            self.numbers.append(numbers)


def own_answers(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 8,
    chat: bool | None = None,
    cache: str | Path | None = None,
) -> OwnAnswers:
    """Let a model answer prompts, greedily: data for `Guard.protect` before it learns anything new.

    Arguments:
        model: a causal language model of transformers; its weights and modes stay as they are.
        tokenizer: its tokenizer.
        prompts: what the model should still answer in the same way later.
        max_new_tokens: the most tokens of an answer.
        batch_size: how many prompts are answered at once.
        chat: whether each prompt is a user's turn, or a text to continue; by default a turn if the
            tokenizer has a chat template.
        cache: a folder for the answers; they are read from there if model, tokenizer and prompts
            are the same.
    """
    check_pair(model, tokenizer)
    whole(1).check("batch_size", batch_size)
    prompts = checked_prompts(prompts)
    asked = encoded_prompts(model, tokenizer, prompts, max_new_tokens, chat)
    file = None
    if cache is not None:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        key = digest_of(*tensors, *tensors.values(), asked, max_new_tokens, _ends(model, tokenizer))
        file = Path(cache) / f"answers-{_FORMAT}-{key}.safetensors"
    if file is not None and file.exists():
        said = _read(file)
    else:
        said = _generated(model, tokenizer, asked, max_new_tokens, batch_size)
        if file is not None:
            _write(file, said)
    known = len(tokenizer)
    if any(token >= known for tokens in said for token in tokens):
        raise ConfigError(
            f"the tokenizer does not fit the model: the model says tokens of {known} and more, "
            f"and the tokenizer has {known}"
        )
    texts = (tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in said)
    answers = [
        Answer(prompt, text, (*question, *tokens), len(question))
        for prompt, text, question, tokens in zip(prompts, texts, asked, said, strict=True)
    ]
    return OwnAnswers(answers, batch_size)


def _generated(
    model: Any, tokenizer: Any, asked: Sequence[list[int]], most: int, batch_size: int
) -> list[list[int]]:
    """The tokens of each answer, with the one that ends it."""
    ends = _ends(model, tokenizer)
    padding = ends[0] if ends else 0
    said: list[list[int]] = [[] for _ in asked]
    # Prompts of about one length together need little padding.
    order = sorted(range(len(asked)), key=lambda i: len(asked[i]))
    groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    with eval_mode(model), torch.no_grad(), _greedy(model), bar_on_terminal("own answers"):
        for done, numbers in enumerate(groups):
            advance("answers", done, len(groups))
            longest = max(len(asked[i]) for i in numbers)
            rows = [[padding] * (longest - len(asked[i])) + asked[i] for i in numbers]
            masks = [[0] * (longest - len(asked[i])) + [1] * len(asked[i]) for i in numbers]
            tokens = model.generate(
                input_ids=torch.tensor(rows, device=model.device),
                attention_mask=torch.tensor(masks, device=model.device),
                max_new_tokens=most,
                pad_token_id=padding,
                eos_token_id=ends or None,
            )
            for i, row in zip(numbers, tokens[:, longest:].tolist(), strict=True):
                end = next((n for n, token in enumerate(row) if token in ends), len(row))
                said[i] = row[: end + 1]
    return said


@contextmanager
def _greedy(model: Any) -> Iterator[None]:
    """Without the sampling, beams and penalties that a model's own configuration may ask for."""
    adapted = getattr(model, "get_base_model", None)  # inside the adapters of peft
    inner: Any = adapted() if callable(adapted) else model
    before = inner.generation_config
    inner.generation_config = type(before)(do_sample=False)
    try:
        yield
    finally:
        inner.generation_config = before


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end an answer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ends = configured if configured is not None else tokenizer.eos_token_id
    return [] if ends is None else [*ends] if isinstance(ends, list | tuple) else [int(ends)]


def _write(file: Path, said: Sequence[list[int]]) -> None:
    tensors = {
        "tokens": torch.tensor([token for tokens in said for token in tokens]),
        "lengths": torch.tensor([len(tokens) for tokens in said]),
    }
    write_atomically(file, lambda new: save_file(tensors, new))


def _read(file: Path) -> list[list[int]]:
    try:
        stored: Mapping[str, Tensor] = load_file(file)
        lengths = stored["lengths"].tolist()
        return [tokens.tolist() for tokens in stored["tokens"].split(lengths)]
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise DataError(
            f"{file} has no answers that can be read ({first_line(error)}): remove it"
        ) from error
