"""Keep what a pretrained language model knows while it learns something new."""

from forgetless.llm.answers import Answer, OwnAnswers, own_answers
from forgetless.llm.behaviour import Behaviour, ModelComparison
from forgetless.llm.compare import compare
from forgetless.llm.estimate import estimate

__all__ = [
    "Answer",
    "Behaviour",
    "ModelComparison",
    "OwnAnswers",
    "compare",
    "estimate",
    "own_answers",
]
