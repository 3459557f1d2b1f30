"""What fine-tuning changed in a language model: its answers, its knowledge, its loss on texts."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from forgetless.llm.answers import OwnAnswers, own_answers
from forgetless.llm.behaviour import Behaviour, ModelComparison
from forgetless.llm.harness import harness_scores
from forgetless.llm.prompts import check_pair, checked_prompts, context, equal_lengths, vocabulary
from forgetless.support.progress import advance, bar_on_terminal
from forgetless.support.validation import ConfigError, DataError, TrainingError, require
from forgetless.tangent import eval_mode

BASE = "base"  # the name of the model that the others are compared with
_TASK = "the new task"  # the name of one that has none
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
    task: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    harness: Sequence[Any] = (),
    harness_options: Mapping[str, Any] | None = None,
    max_new_tokens: int = 64,
    batch_size: int = 8,
    chat: bool | None = None,
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
        task: held-out texts of what was learned, whose loss should fall; of several tasks by name.
        harness: tasks of lm-evaluation-harness, as its `simple_evaluate` takes them.
        harness_options: further arguments of `simple_evaluate`, such as `limit` and `num_fewshot`.
        max_new_tokens, batch_size, chat, cache: as of `own_answers`.
    """
    others = tuned if isinstance(tuned, Mapping) else {"tuned": tuned}
    named = bool(others) and BASE not in others
    require(named, "tuned", [*others], f"a model, or several by names other than {BASE!r}")
    _check_models({BASE: base, **others}, tokenizer)
    examination = Examination(
        base,
        tokenizer,
        prompts,
        texts=texts,
        questions=questions,
        task=task,
        harness=harness,
        harness_options=harness_options,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        chat=chat,
        cache=cache,
    )
    return examination.compared({name: examination.of(m, name) for name, m in others.items()})


@final
class Examination:
    """What a base model does, by which models that were tuned from it are measured one by one.

    Arguments:
        base: the model before.
        tokenizer: of all models.
        prompts, options: as of `compare`.

    Attributes:
        base: what the base model does.
    """

    def __init__(
        self,
        base: nn.Module,
        tokenizer: Any,
        prompts: Sequence[str],
        *,
        texts: Sequence[str] | None = None,
        questions: Mapping[str, str | Sequence[str]] | None = None,
        task: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        harness: Sequence[Any] = (),
        harness_options: Mapping[str, Any] | None = None,
        max_new_tokens: int = 64,
        batch_size: int = 8,
        chat: bool | None = None,
        cache: str | Path | None = None,
    ) -> None:
        self._model, self._tokenizer = base, tokenizer
        self._texts = texts
        self._tasks = task if isinstance(task, Mapping) else {} if task is None else {_TASK: task}
        self._asked = _accepted(questions or {})
        self._harness, self._harness_options = harness, dict(harness_options or {})
        self._batch_size = batch_size
        self._options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "chat": chat,
            "cache": cache,
        }
        self._said = own_answers(base, tokenizer, prompts, **self._options)
        self.base = self._behaviour(base, self._said, [0.0] * len(self._said.answers))

    def divergences(self, model: nn.Module, name: str = "the model") -> list[float]:
        """KL(base ‖ model) per token of the base model's answers, prompt by prompt."""
        return _divergences(self._model, model, self._said, name)

    def of(self, model: nn.Module, name: str = "the model") -> Behaviour:
        """What another model does; the name is for errors."""
        moved = self.divergences(model, name)
        prompts = [answer.prompt for answer in self._said.answers]
        own = own_answers(model, self._tokenizer, prompts, **self._options)
        return self._behaviour(model, own, moved)

    def compared(
        self, models: Mapping[str, Behaviour], families: Mapping[str, str] | None = None
    ) -> ModelComparison:
        """The base model and others together, for a table and a page."""
        prompts = tuple(answer.prompt for answer in self._said.answers)
        every = {BASE: self.base, **models}
        return ModelComparison(prompts, tuple(self._asked), every, families or {})

    def _behaviour(self, model: nn.Module, own: OwnAnswers, moved: Sequence[float]) -> Behaviour:
        tokenizer, size = self._tokenizer, self._batch_size
        replies: tuple[str, ...] = ()
        if self._asked:
            questions = [question for question, _ in self._asked]
            replies = _replies(own_answers(model, tokenizer, questions, **self._options))
        return Behaviour(
            _replies(own),
            tuple(moved),
            tuple(len(one.tokens) - one.start for one in self._said.answers),
            None
            if self._texts is None
            else loss_of_texts(model, tokenizer, self._texts, "texts", size),
            {
                name: loss_of_texts(model, tokenizer, texts, "task", size)
                for name, texts in self._tasks.items()
            },
            replies,
            tuple(_is_right(r, good) for r, (_, good) in zip(replies, self._asked, strict=True)),
            harness_scores(model, tokenizer, self._harness, size, self._harness_options),
        )


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
def _divergences(base: nn.Module, model: nn.Module, said: OwnAnswers, name: str) -> list[float]:
    """KL(base ‖ model) per token of the base model's answers, prompt by prompt."""
    found = [0.0] * len(said.answers)
    for done, (batch, numbers) in enumerate(zip(said, said.numbers, strict=True)):
        advance("how far the answers moved", done, len(said.numbers))
        before = _logits(base, batch["input_ids"])
        after = _logits(model, batch["input_ids"]).to(before.device)
        for row, number in enumerate(numbers):
            start = said.answers[number].start - 1  # the logits there are about its first token
            kl = _divergence(before[row, start:-1], after[row, start:-1])
            if not math.isfinite(kl):
                raise TrainingError(f"the outputs of {name} are not finite: it has diverged")
            found[number] = kl
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
def loss_of_texts(
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
