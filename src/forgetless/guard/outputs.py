"""Which scalars of a model's outputs are protected, and which loss is followed."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, mse_loss

from forgetless.errors import ConfigError, require

# From what the model returns and the target to (n,), or (n, K) for K scalars a sample.
Output = Callable[..., Tensor]
Named = Literal["class", "regression", "likelihood"]
_IGNORED = -100  # the label that transformers' losses leave out


def logits_of(outputs: Any) -> Tensor:
    """The tensor in what a model returns: itself, `.logits`, or the first of a tuple."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "logits" in outputs:
        outputs = outputs["logits"]
    elif hasattr(outputs, "logits"):
        outputs = outputs.logits
    elif isinstance(outputs, tuple | list) and outputs:
        outputs = outputs[0]
    if not isinstance(outputs, Tensor):
        raise ConfigError(
            f"the model returns {type(outputs).__name__}: say with output= and loss= how to read it"
        )
    return outputs


def true_class(outputs: Any, target: Tensor) -> Tensor:
    """The logit of a sample's own class, (n,)."""
    logits = logits_of(outputs)
    return logits.gather(1, target.unsqueeze(1)).squeeze(1)


def regression(outputs: Any, *target: Tensor) -> Tensor:
    """Every number that the model predicts, (n, K)."""
    return logits_of(outputs).flatten(1) if logits_of(outputs).dim() > 1 else logits_of(outputs)


def likelihood(outputs: Any, tokens: Tensor) -> Tensor:
    """The mean log-likelihood of a sequence's next tokens, (n,).

    Logits (n, T, V) at a position are about the token after it; tokens (n, T) of −100 are left
    out, as transformers' language models do.
    """
    logits, next_tokens = logits_of(outputs)[:, :-1], tokens[:, 1:]
    counts = next_tokens != _IGNORED
    chosen = next_tokens.clamp_min(0).unsqueeze(-1)
    each = log_softmax(logits, -1).gather(-1, chosen).squeeze(-1) * counts
    return each.sum(1) / counts.sum(1).clamp_min(1)


OUTPUTS: dict[str, Output] = {
    "class": true_class,
    "regression": regression,
    "likelihood": likelihood,
}


def chosen_output(output: Named | Output | None, outputs: Any, target: Tensor | None) -> Output:
    """The scalars to protect: as chosen, or by what model and target look like."""
    if callable(output):
        return output
    if output is not None:
        require(output in OUTPUTS, "output", output, f"{', '.join(OUTPUTS)} or a function")
        _check(output, outputs, target)
        return OUTPUTS[output]
    logits = logits_of(outputs)
    if target is None or target.is_floating_point():
        return regression
    if logits.dim() == 2 and target.dim() == 1:
        _check("class", outputs, target)
        return true_class
    raise ConfigError(
        f"outputs {tuple(logits.shape)} with target {tuple(target.shape)}: say with output= what "
        "to protect, 'likelihood' for a language model, or a function of outputs and target"
    )


def _check(output: str, outputs: Any, target: Tensor | None) -> None:
    shape = tuple(logits_of(outputs).shape)
    if output == "regression":
        return
    kind = "none" if target is None else f"{tuple(target.shape)} of {target.dtype}"
    whole = target is not None and not target.is_floating_point()
    dims = {"class": (2, 1), "likelihood": (3, 2)}[output]
    fits = target is not None and whole and (len(shape), target.dim()) == dims
    accepted = {"class": "labels (n,) for outputs (n, C)", "likelihood": "tokens (n, T)"}[output]
    require(fits, f"the target of output={output!r}", kind, f"{accepted}, for outputs {shape}")
    if output == "class" and target is not None:
        low, high = int(target.min()), int(target.max())
        require(low >= 0 and high < shape[1], "labels", f"{low} to {high}", f"in [0, {shape[1]})")


def usual_loss(outputs: Any, target: Tensor | None) -> Tensor:
    """Each sample's loss, (n,): cross-entropy for labels and tokens, squared error for numbers."""
    logits = logits_of(outputs)
    if target is None:
        raise ConfigError("this method follows a loss: batches need a target, or give loss=")
    if target.is_floating_point():
        each = mse_loss(logits.reshape(target.shape), target, reduction="none")
        return each.flatten(1).mean(1) if each.dim() > 1 else each
    if logits.dim() == 3 and target.dim() == 2:
        return -likelihood(outputs, target)
    if logits.dim() == 2 and target.dim() == 1:
        return cross_entropy(logits, target, reduction="none")
    raise ConfigError(
        f"no usual loss for outputs {tuple(logits.shape)} and target {tuple(target.shape)}: "
        "give loss=, a function of outputs and target"
    )


def sample_losses(loss: Output | None, outputs: Any, target: Tensor | None) -> Tensor:
    """Each sample's loss, (n,); with a user's loss, from a batch of one sample each."""
    if loss is None:
        return usual_loss(outputs, target)
    count = len(logits_of(outputs))
    return torch.stack([mean_loss(loss, *_one(outputs, target, i)) for i in range(count)])


def mean_loss(loss: Output | None, outputs: Any, target: Tensor | None) -> Tensor:
    """The loss of a batch, a scalar."""
    if loss is None:
        return usual_loss(outputs, target).mean()
    value = loss(outputs) if target is None else loss(outputs, target)
    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    single = isinstance(value, Tensor) and value.numel() == 1
    require(single, "what loss= returns", shape, "one number")
    return value.reshape(())


def _one(outputs: Any, target: Tensor | None, i: int) -> tuple[Any, Tensor | None]:
    """What the model would have returned for one sample alone."""

    def cut(value: Any) -> Any:
        return value[i : i + 1] if isinstance(value, Tensor) else value

    if isinstance(outputs, Mapping):
        one: Any = type(outputs)(**{key: cut(value) for key, value in outputs.items()})
    elif isinstance(outputs, tuple | list):
        one = type(outputs)(map(cut, outputs))
    else:
        one = cut(outputs)
    return one, None if target is None else target[i : i + 1]
