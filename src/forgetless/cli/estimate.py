"""The command `forgetless estimate`: what protecting a language model on disk will cost."""

from pathlib import Path
from typing import Annotated

import typer

from forgetless.cli.progress import say
from forgetless.llm import estimate


def estimate_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A folder with a model of transformers, or a GGUF file."
        ),
    ],
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", help="Answers that will be protected.")
    ] = 300,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="Tokens of each, with its prompt.")
    ] = 128,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="NAME",
            help="Beginning of the names of parameters that are not trained; can be repeated.",
        ),
    ] = None,
) -> None:
    """Say what `Guard.protect` will take of a language model, on this machine.

    The model's configuration is read; no weight is loaded and nothing is trained.
    """
    say(str(estimate(model, samples=samples, tokens=tokens, exclude=exclude or ())))
