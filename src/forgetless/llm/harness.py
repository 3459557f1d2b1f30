"""Scores of lm-evaluation-harness for a model in memory."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from forgetless.tangent import eval_mode


def harness_scores(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[Any],
    batch_size: int,
    options: Mapping[str, Any],
) -> dict[str, float]:
    """The first metric of each task, by the names of both; empty without tasks.

    The harness seeds Python, NumPy and torch; their random states are put back.

    Arguments:
        model: of transformers.
        tokenizer: its tokenizer.
        tasks: as `lm_eval.simple_evaluate` takes them: names, or descriptions as dicts.
        batch_size: how many requests are run at once.
        options: further arguments of `simple_evaluate`.
    """
    if not tasks:
        return {}
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ImportError(
            "this needs lm-evaluation-harness: pip install 'forgetless[harness]'"
        ) from error
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the harness seeds this one
    try:
        with torch.random.fork_rng(), eval_mode(model):
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            found = simple_evaluate(wrapped, tasks=[*tasks], **options)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
    scores = {}
    for task, metrics in found["results"].items():
        name, value = next(
            (key, value)
            for key, value in metrics.items()
            if isinstance(value, int | float) and "," in key and "_stderr" not in key
        )
        scores[f"{task}, {name.split(',')[0]}"] = float(value)
    return scores
