"""Which scalars of a model's outputs are protected."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.functional import log_softmax

from forgetless.support.errors import ConfigError, DataError, require
from forgetless.tangent import evaluation

# From what the model returns and the target to (n,), or (n, K) for K scalars a sample.
Output = Callable[..., Tensor]
Named = Literal["class", "regression", "likelihood", "tokens"]
OF_SEQUENCES = ("likelihood", "tokens")  # for outputs (n, T, V) with labels (n, T)
_IGNORED = -100  # the label that transformers' losses leave out


def logits_of(outputs: Any) -> Tensor:
    """The tensor in what a model returns: itself, `.logits`, or the first of a tuple."""
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    elif hasattr(outputs, "logits"):
        found = outputs.logits
    elif isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"the model returns {_said(outputs)}: say with output= which numbers of it to protect, "
            "and with loss= what its loss is"
        )
    return found


def true_class(outputs: Any, target: Tensor) -> Tensor:
    """The logit of a sample's own class, (n,)."""
    return evaluation.true_class(logits_of(outputs), target)


def regression(outputs: Any, *target: Tensor) -> Tensor:
    """Every number that the model predicts, (n, K)."""
    predicted = logits_of(outputs)
    return predicted.flatten(1) if predicted.dim() > 1 else predicted


def likelihood(outputs: Any, tokens: Tensor) -> Tensor:
    """The mean log-likelihood of a sequence's next tokens, (n,).

    Logits (n, T, V) at a position are about the token after it; tokens (n, T) of −100 are left
    out, as transformers' language models do.
    """
    return _mean_likelihood(logits_of(outputs)[:, :-1], tokens[:, 1:])


def likelihood_in_place(outputs: Any, labels: Tensor) -> Tensor:
    """The mean log-likelihood of a sequence's labels, (n,).

    Logits (n, T, V) at a position are about the label (n, T) at the same one, as those of taggers,
    of masked language models and of encoder-decoders; labels of −100 are left out.
    """
    return _mean_likelihood(logits_of(outputs), labels)


def _mean_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Over a sequence's labels that count, (n, T, V) and (n, T) → (n,); zero if none does."""
    counts = labels != _IGNORED
    chosen = labels.long().clamp_min(0).unsqueeze(-1)
    each = log_softmax(logits, -1).gather(-1, chosen).squeeze(-1) * counts
    return each.sum(1) / counts.sum(1).clamp_min(1)


def counted(output: Named | Output | None, targets: Iterable[Tensor | None]) -> int:
    """How many labels of sequences count; of other outputs, how many samples there are."""
    labels = [target for target in targets if target is not None]
    if output == "likelihood":
        labels = [tokens[..., 1:] for tokens in labels]
    if output in OF_SEQUENCES:
        return sum(int((some != _IGNORED).sum()) for some in labels)
    return sum(map(len, labels))


def refuse_none(output: Named | Output | None, count: int) -> None:
    """Refuse sequences of which nothing counts: they would protect nothing."""
    if output in OF_SEQUENCES and not count:
        what = "next token" if output == "likelihood" else "label"
        raise DataError(f"there is no {what} to remember: all are {_IGNORED}, or none follows")


# How to choose between those of sequences, in words.
SEQUENCES = (
    "'likelihood' if logits are about the next token, 'tokens' if about the one at their position"
)
OUTPUTS: dict[str, Output] = {
    "class": true_class,
    "regression": regression,
    "likelihood": likelihood,
    "tokens": likelihood_in_place,
}


def named_output(output: Named | Output | None, model: nn.Module) -> Named | Output | None:
    """What a user chose to protect, if there is such a thing in the model."""
    known = output is None or callable(output) or (isinstance(output, str) and output in OUTPUTS)
    require(known, "output", output, f"{', '.join(map(repr, OUTPUTS))} or a function")
    config = getattr(model, "config", None)
    if output == "likelihood" and getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            "output must be 'tokens' for an encoder-decoder, not 'likelihood': its logits are "
            "about the label at the same position, not about the next one"
        )
    return output


def chosen_output(
    output: Named | Output | None, outputs: Any, target: Tensor | None, targets: Tensor | None
) -> Output:
    """The scalars to protect: as chosen, or by what model and target look like.

    Arguments:
        outputs, target: of a few samples.
        targets: of all samples.
    """
    if isinstance(output, str):
        check_target(output, outputs, targets)
        return OUTPUTS[output]
    if output is not None:
        _check_scalars(output, outputs, target)
        return output
    logits = logits_of(outputs)
    if target is None or target.is_floating_point():
        return regression
    if logits.dim() == 2 and target.dim() == 1:
        check_target("class", outputs, targets)
        return true_class
    raise ConfigError(
        f"outputs {tuple(logits.shape)} with target {tuple(target.shape)}: say with output= what "
        f"to protect, {SEQUENCES}, or a function of outputs and target"
    )


def check_target(output: str, outputs: Any, targets: Tensor | None) -> None:
    """Refuse targets that do not go with the outputs: of another shape, or outside of them."""
    logits = logits_of(outputs)
    if output == "regression":
        return
    kind = "none" if targets is None else f"{tuple(targets.shape)} of {targets.dtype}"
    whole = targets is not None and not targets.is_floating_point()
    if output == "class":
        fits = whole and logits.dim() == 2 and targets is not None and targets.dim() == 1
        accepted = "labels (n,) of an integer type, for outputs (n, C)"
    else:
        fits = whole and logits.dim() == 3 and targets is not None and targets.dim() == 2
        fits = fits and targets is not None and targets.shape[1] == logits.shape[1]
        accepted = "tokens (n, T) of an integer type, for outputs (n, T, V)"
    got = f"{kind}, for outputs {('n', *logits.shape[1:])}".replace("'", "")
    if not fits or targets is None:
        raise ConfigError(f"the target of output={output!r} must be {accepted}, not {got}")
    counted = targets if output == "class" else targets[targets != _IGNORED]
    if counted.numel():
        low, high = int(counted.min()), int(counted.max())
        inside = low >= 0 and high < logits.shape[-1]
        what = "labels" if output == "class" else "tokens"
        require(inside, what, f"{low} to {high}", f"in [0, {logits.shape[-1]}), as the outputs")


def _check_scalars(output: Output, outputs: Any, target: Tensor | None) -> None:
    """Refuse a function that does not give one number, or K, for each sample."""
    try:
        value = output(outputs) if target is None else output(outputs, target)
    except (TypeError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"the function output= fails on the model's outputs and the target: {reason}"
        ) from error
    count = batch_size(outputs, target)
    fits = isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (1, 2)
    fits = fits and (count is None or len(value) == count)
    accepted = "real numbers (n,) or (n, K)"
    require(fits, "what the function output= returns", _said(value), f"{accepted} for n samples")


def batch_size(outputs: Any, target: Tensor | None) -> int | None:
    """How many samples there are, None if that cannot be seen."""
    if target is not None:
        return len(target)
    several = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
    for value in several if isinstance(several, tuple | list) else [several]:
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    return None


def _said(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value))}"
    return f"a {type(value).__name__}"
