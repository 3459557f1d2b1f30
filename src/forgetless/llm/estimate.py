"""What protecting a language model on disk will cost, from its configuration alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from forgetless.guard import Estimate, Guard
from forgetless.methods import Method
from forgetless.support.validation import ConfigError, DataError, first_line, whole


def estimate(
    path: str | Path,
    *,
    samples: int = 300,
    tokens: int = 128,
    exclude: str | Sequence[str] = (),
    method: Method[Any] | None = None,
) -> Estimate:
    """What `Guard.protect` will take of a model on disk, on this machine; no weight is loaded.

    Arguments:
        path: a folder with a model of transformers, or a GGUF file.
        samples: how many answers will be protected.
        tokens: of each, with its prompt.
        exclude: beginnings of the names of parameters that are not trained.
        method: as for `Guard`, with its default.
    """
    whole(1).check("samples", samples)
    whole(2).check("tokens", tokens)
    model = _empty_model(Path(path))
    exclude = [exclude] if isinstance(exclude, str) else [*exclude]
    with Guard(
        model, torch.optim.SGD(model.parameters(), lr=1.0), method, exclude=exclude
    ) as guard:
        # The sizes are all that counts. Labels are checked, so they have values.
        ids = torch.zeros(samples, tokens, dtype=torch.long)
        return guard.estimate({"input_ids": ids, "labels": ids})


def _empty_model(path: Path) -> Any:
    """The model that the configuration describes, without weights."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ImportError("this needs transformers: pip install 'forgetless[llm]'") from error
    if not path.exists():
        raise DataError(f"{path} does not exist: give a folder with a model, or a GGUF file")
    try:
        if path.is_file():
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        else:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # what is trained are its weights in full precision
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ImportError as error:  # of what reads GGUF files
        raise ImportError(
            f"{path} cannot be read: {first_line(error)}; pip install 'forgetless[llm]'"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path} has no language model that transformers can read: {first_line(error)}"
        ) from error
    if not model.can_generate():
        raise ConfigError(f"{path} has a {type(model).__name__}, which generates no text")
    return model
