"""What fine-tuning changed in a language model: its answers, its knowledge, its loss on texts."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgetless.llm.answers import OwnAnswers, own_answers
from forgetless.llm.behaviour import Behaviour, ModelComparison
from forgetless.llm.prompts import check_pair, checked_prompts, context, equal_lengths, vocabulary
from forgetless.support.progress import advance, bar_on_terminal
from forgetless.support.validation import ConfigError, DataError, TrainingError, require
from forgetless.tangent import eval_mode

BASE = "base"  # the name of the model that the others are compared with
_WINDOW = 512  # the most tokens of a text that are run together


@bar_on_terminal("comparing language models")
def compare(
    base: nn.Module,
    tuned: nn.Module | Mapping[str, nn.Module],
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    texts: Sequence[str] | None = None,
    questions: Mapping[str, str | Sequence[str]] | None = None,
    task: Sequence[str] | None = None,
    max_new_tokens: int = 64,
    batch_size: int = 8,
    cache: str | Path | None = None,
) -> ModelComparison:
    """How far fine-tuning has moved what a language model does.

        KL(base ‖ tuned) = mean over t of Σ_v p(v | x_<t) log (p(v | x_<t) / q(v | x_<t))

    over the tokens t of the base model's greedy answers, with p the base model's probabilities and
    q the tuned one's.

    Arguments:
        base: the model before; its answers are what should stay.
        tuned: the model after, or several by name.
        tokenizer: of all of them.
        prompts: ones that were not protected and not trained on.
        texts: general ones, whose loss should not rise.
        questions: question → the answer, or those that are accepted; a reply is right if one of
            them occurs in it as words.
        task: held-out texts of what was learned, whose loss should fall.
        max_new_tokens, batch_size, cache: as of `own_answers`.
    """
    others = tuned if isinstance(tuned, Mapping) else {"tuned": tuned}
    named = bool(others) and BASE not in others
    require(named, "tuned", [*others], f"a model, or several by names other than {BASE!r}")
    models = {BASE: base, **others}
    _check_models(models, tokenizer)
    asked = _accepted(questions or {})
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "cache": cache,
    }
    said = own_answers(base, tokenizer, prompts, **options)
    moved = _divergences(models, said)
    found = {}
    for name, model in models.items():
        own = said if model is base else own_answers(model, tokenizer, prompts, **options)
        replies: tuple[str, ...] = ()
        if asked:
            replies = _replies(own_answers(model, tokenizer, [q for q, _ in asked], **options))
        found[name] = Behaviour(
            _replies(own),
            tuple(moved[name]),
            tuple(len(one.tokens) - one.start for one in said.answers),
            None if texts is None else _loss(model, tokenizer, texts, "texts", batch_size),
            None if task is None else _loss(model, tokenizer, task, "task", batch_size),
            replies,
            tuple(_is_right(r, good) for r, (_, good) in zip(replies, asked, strict=True)),
        )
    return ModelComparison(tuple(a.prompt for a in said.answers), tuple(asked), found)


def _check_models(models: Mapping[str, nn.Module], tokenizer: Any) -> None:
    """Reject models that are one and the same, or do not speak the same tokens."""
    base, *others = models.values()
    for model in models.values():
        check_pair(model, tokenizer)
    parts = set(map(id, base.parameters()))
    for model in others:
        if parts & set(map(id, model.parameters())):
            raise ConfigError(
                "base and tuned share weights, so they are one model (adapters of peft are put "
                "into the model that they are given): copy the base model before training, or "
                "load it again"
            )
        wanted, known = vocabulary(base), vocabulary(model)
        require(known == wanted, "tuned", f"one of {known}", f"a model of {wanted} tokens")


@torch.no_grad()
def _divergences(models: Mapping[str, nn.Module], said: OwnAnswers) -> dict[str, list[float]]:
    """KL(base ‖ each model) per token of the base model's answers, prompt by prompt."""
    base = next(iter(models.values()))
    found = {name: [0.0] * len(said.answers) for name in models}
    for done, (batch, numbers) in enumerate(zip(said, said.numbers, strict=True)):
        advance("how far the answers moved", done, len(said.numbers))
        before = _logits(base, batch["input_ids"])
        for name, model in list(models.items())[1:]:
            after = _logits(model, batch["input_ids"]).to(before.device)
            for row, number in enumerate(numbers):
                start = said.answers[number].start - 1  # the logits there are about its first token
                kl = _divergence(before[row, start:-1], after[row, start:-1])
                if not math.isfinite(kl):
                    raise TrainingError(f"the outputs of {name} are not finite: it has diverged")
                found[name][number] = kl
    return found


def _divergence(before: Tensor, after: Tensor) -> float:
    """Mean KL of two rows of logits, (T, V) each, in float64."""
    p, q = (logits.double().log_softmax(-1) for logits in (before, after))
    return float((p.exp() * (p - q)).sum(-1).mean().clamp_min(0))  # below 0 by rounding alone


def _logits(model: Any, tokens: Tensor) -> Tensor:
    with eval_mode(model):
        tokens = tokens.to(model.device)
        logits: Tensor = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    return logits


@torch.no_grad()
def _loss(
    model: Any, tokenizer: Any, texts: Sequence[str], argument: str, batch_size: int
) -> float:
    """Mean negative log-likelihood of the texts' next tokens, in nats."""
    length = min(_WINDOW, context(model) or _WINDOW)
    windows = []
    for text in checked_prompts(texts, argument):
        tokens = tokenizer(text, verbose=False)["input_ids"]  # no warning of long texts
        windows += [tokens[i : i + length] for i in range(0, len(tokens), length)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise DataError(f"{argument} have no token that follows another")
    total, count = 0.0, 0
    for _, tokens in equal_lengths(windows, batch_size):
        logs = _logits(model, tokens)[:, :-1].float().log_softmax(-1)
        each = logs.gather(-1, tokens[:, 1:].to(logs.device).unsqueeze(-1))
        total -= float(each.double().sum())
        count += each.numel()
    return total / count


def _accepted(
    questions: Mapping[str, str | Sequence[str]],
) -> list[tuple[str, tuple[str, ...]]]:
    asked = []
    for question, answer in questions.items():
        answers = (answer,) if isinstance(answer, str) else tuple(answer)
        asked.append((question, tuple(checked_prompts(answers, f"the answers to {question!r}"))))
    return asked


def _replies(said: OwnAnswers) -> tuple[str, ...]:
    return tuple(answer.text for answer in said.answers)


def _is_right(reply: str, accepted: Sequence[str]) -> bool:
    """Whether one of the accepted answers occurs as words, whatever its case."""
    return any(
        re.search(rf"(?<!\w){re.escape(answer.casefold())}(?!\w)", reply.casefold())
        for answer in accepted
    )
