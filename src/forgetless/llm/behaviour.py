"""What models do, in numbers and words: one before fine-tuning, and those after it."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import final

from forgetless.llm.page import build_page
from forgetless.support.files import write_atomically


@final
@dataclass(frozen=True)
class Behaviour:
    """What one of the compared models does.

    Arguments:
        answers: its own, to the prompts.
        kl: for each prompt KL(base ‖ it) in nats, the mean over the tokens of the base's answer.
        tokens: how many tokens each of these answers has.
        text_loss: nats per token of general texts; None without them.
        tasks: name of each new task → nats per token of its texts.
        replies: to the questions.
        right: which of these are.
        scores: of lm-evaluation-harness, by task and metric.
    """

    answers: tuple[str, ...]
    kl: tuple[float, ...]
    tokens: tuple[int, ...]
    text_loss: float | None = None
    tasks: Mapping[str, float] = field(default_factory=dict)
    replies: tuple[str, ...] = ()
    right: tuple[bool, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def task_loss(self) -> float | None:
        """The mean over the new tasks; None without any."""
        return sum(self.tasks.values()) / len(self.tasks) if self.tasks else None

    @property
    def mean_kl(self) -> float:
        """KL per token of all answers."""
        return sum(k * n for k, n in zip(self.kl, self.tokens, strict=True)) / sum(self.tokens)

    @property
    def kl_error(self) -> float | None:
        """The standard error of `mean_kl` over the prompts; None for a single one."""
        n, mean = len(self.kl), self.mean_kl
        if n < 2:
            return None
        # Of a ratio of sums: the mean over tokens leaves a rest of each prompt.
        rests = [m * (k - mean) for k, m in zip(self.kl, self.tokens, strict=True)]
        return math.sqrt(n / (n - 1) * sum(r * r for r in rests)) / sum(self.tokens)

    @property
    def right_share(self) -> float | None:
        """The share of the questions whose reply is right; None without questions."""
        return sum(self.right) / len(self.right) if self.right else None


@final
@dataclass(frozen=True)
class ModelComparison:
    """A base model and models that were fine-tuned from it, on the same prompts.

    Arguments:
        prompts: as given.
        questions: with the replies that count as right.
        models: name → what it does; the first is the base model.
        families: name of a model → what it has in common with others, such as the method at
            another learning rate; the page links these and gives them one colour.
    """

    prompts: tuple[str, ...]
    questions: tuple[tuple[str, tuple[str, ...]], ...]
    models: Mapping[str, Behaviour]
    families: Mapping[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """The numbers as a table of text: a line for each model."""
        shown = _columns(next(iter(self.models.values())))
        lines = [["", *shown]]
        lines += [[name, *(f(one) for f in shown.values())] for name, one in self.models.items()]
        columns = [c for c in zip(*lines, strict=True) if {*c[1:]} != {"–"}]
        widths = [max(map(len, column)) for column in columns]
        first, *others = (
            [cell.rjust(width) for cell in column]
            for column, width in zip(columns, widths, strict=True)
        )
        names = [name.strip().ljust(widths[0]) for name in first]
        return "\n".join("  ".join(cells) for cells in zip(names, *others, strict=True))

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write it as one HTML page that opens from disk."""
        file = Path(path)
        text = build_page(self._content())
        write_atomically(file, lambda new: new.write_text(text, "utf-8"))
        return file

    def _content(self) -> dict[str, object]:
        return {
            "prompts": self.prompts,
            "questions": self.questions,
            "models": [
                {
                    "name": name,
                    "kl": one.mean_kl,
                    "error": one.kl_error,
                    "text": one.text_loss,
                    "task": one.task_loss,
                    "tasks": dict(one.tasks),
                    "scores": dict(one.scores),
                    "family": self.families.get(name, name),
                    "share": one.right_share,
                    "each": one.kl,
                    "answers": one.answers,
                    "replies": one.replies,
                    "right": one.right,
                }
                for name, one in self.models.items()
            ],
        }


def _shown_kl(one: Behaviour) -> str:
    if not any(one.kl):
        return "0"
    error = one.kl_error
    return f"{one.mean_kl:.3g}" + (f" ± {error:.1g}" if error is not None else "")


def _shown_right(one: Behaviour) -> str:
    return f"{sum(one.right)} of {len(one.right)}" if one.right else "–"


def _fixed(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _columns(base: Behaviour) -> dict[str, Callable[[Behaviour], str]]:
    """Heading → the text of a model's cell."""
    columns: dict[str, Callable[[Behaviour], str]] = {
        "KL to the base": _shown_kl,
        "loss on texts": lambda one: _fixed(one.text_loss),
    }
    for task in base.tasks:
        heading = f"loss on {task}" if len(base.tasks) > 1 else "loss on the task"
        columns[heading] = partial(_shown_task, task)
    columns["questions right"] = _shown_right
    for name in base.scores:
        columns[name] = partial(_shown_score, name)
    return columns


def _shown_task(name: str, one: Behaviour) -> str:
    return _fixed(one.tasks[name])


def _shown_score(name: str, one: Behaviour) -> str:
    return _fixed(one.scores[name])
