"""Texts as tokens of a language model, and what a model and a tokenizer must fit."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forgetless.support.validation import (
    ConfigError,
    DataError,
    first_line,
    require,
    whole,
)

_SHOWN = 40  # characters of a prompt in an error


def checked_prompts(prompts: Any, argument: str = "prompts") -> list[str]:
    """Prompts as a list; none at all, and any that is empty or no text, is rejected."""
    found = [] if isinstance(prompts, str) else list(prompts)
    require(bool(found), argument, prompts, "a list of at least one text")
    for number, prompt in enumerate(found):
        good = isinstance(prompt, str) and bool(prompt.strip())
        require(good, f"{argument}[{number}]", prompt, "a text that is not empty")
    return found


def check_pair(model: nn.Module, tokenizer: Any) -> None:
    """Reject a model that generates no text, and a tokenizer whose tokens it does not have."""
    generates = getattr(model, "can_generate", None)
    if not callable(generates) or not generates():
        raise ConfigError(
            f"model must be a model of transformers that generates text, not {type(model).__name__}"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError("model must be a causal language model, not an encoder-decoder")
    tokens, known = len(tokenizer), vocabulary(model)
    if tokens > known:
        raise ConfigError(
            f"the tokenizer does not fit the model: it has {tokens} tokens, and the model's "
            f"vocabulary has {known}"
        )


def vocabulary(model: Any) -> int:
    """How many tokens a model knows."""
    return len(model.get_input_embeddings().weight)


def context(model: Any) -> int | None:
    """How many tokens a model takes at most; None if its configuration sets no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def encoded_prompts(
    model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int, chat: bool | None
) -> list[list[int]]:
    """The tokens of each prompt, as a user's turn or as they are.

    Arguments:
        chat: whether they are turns; None if the tokenizer has a chat template.
    """
    whole(1).check("max_new_tokens", max_new_tokens)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise ConfigError(
            "the tokenizer has no chat template, so a prompt cannot be a user's turn: set "
            "tokenizer.chat_template to the one that the model was trained with, or give "
            "chat=False to let the model continue the bare prompts"
        )
    most, found = context(model), []
    for prompt in prompts:
        shown = prompt if len(prompt) <= _SHOWN else f"{prompt[:_SHOWN]}…"
        is_turn = has_template if chat is None else chat
        tokens = _turn(tokenizer, prompt, shown) if is_turn else _bare(tokenizer, prompt)
        if not tokens:
            raise DataError(f"the prompt {shown!r} has no tokens")
        if most is not None and len(tokens) + max_new_tokens > most:
            raise DataError(
                f"the prompt {shown!r} has {len(tokens)} tokens, and {max_new_tokens} for the "
                f"answer are more than the model's context of {most}"
            )
        found.append(tokens)
    return found


def _bare(tokenizer: Any, prompt: str) -> list[int]:
    return list(tokenizer(prompt)["input_ids"])


def _turn(tokenizer: Any, prompt: str, shown: str) -> list[int]:
    turn = [{"role": "user", "content": prompt}]
    # As text first: what the template gives as tokens differs between versions of transformers.
    try:
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # of any kind: templates are programs
        raise DataError(
            f"the tokenizer's chat template cannot render the prompt {shown!r} as a user's turn "
            f"({first_line(error)}); chat=False leaves it out"
        ) from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def equal_lengths(
    sequences: Sequence[Sequence[int]], batch_size: int
) -> Iterator[tuple[list[int], Tensor]]:
    """Sequences of one length each as batches, with their numbers: (n, T), the shortest first.

    Nothing is padded, so that nothing but text is in the moments of a layer's inputs.
    """
    by_length: dict[int, list[int]] = {}
    for number, sequence in enumerate(sequences):
        by_length.setdefault(len(sequence), []).append(number)
    for _, numbers in sorted(by_length.items()):
        for start in range(0, len(numbers), batch_size):
            some = numbers[start : start + batch_size]
            yield some, torch.tensor([list(sequences[i]) for i in some])
