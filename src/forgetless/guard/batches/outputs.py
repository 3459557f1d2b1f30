"""Protected scalars of a model's outputs, and the loss that methods follow."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, mse_loss

from forgetless.methods.base import MomentOutputs
from forgetless.support.validation import ConfigError, DataError, first_line, require
from forgetless.tangent import drawn_likelihood, evaluation, mixed_likelihood, probed

# From the model's outputs and the target to (n,), or (n, K) for K scalars a sample.
Output = Callable[..., Tensor]
# From the same to the loss of the batch, one number.
LossFn = Callable[..., Tensor]
Named = Literal["class", "regression", "likelihood", "tokens"]
_SEQUENCES = ("likelihood", "tokens")  # for outputs (n, T, V) with labels (n, T)
_CHOICE = (
    "'likelihood' if logits are about the next token, 'tokens' if about the one at their position"
)
_IGNORED = -100  # the label that transformers' losses leave out


def logits_of(outputs: Any) -> Tensor:
    """The tensor in a model's outputs: they, their `.logits`, or the first of a tuple."""
    found = outputs
    if isinstance(outputs, Mapping):
        found, loss = outputs.get("logits"), outputs.get("loss")
        found = loss if found is None and isinstance(loss, Tensor) and not loss.dim() else found
    elif hasattr(outputs, "logits"):
        found = outputs.logits
    elif isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"the model returns {_described(outputs)}: say with output= which numbers of it to "
            "protect, and with loss= what its loss is"
        )
    if not found.dim():
        raise ConfigError(
            "the model returns one number for a whole batch, such as its loss, and outputs of each "
            "sample are needed: let forward return them, choose them with output=, for example "
            "lambda outputs, target: outputs[1], or leave out with unpack= the labels that make "
            "it return a loss"
        )
    return found


def true_class_output(outputs: Any, target: Tensor) -> Tensor:
    """The logit of a sample's own class, (n,)."""
    return evaluation.true_class(logits_of(outputs), target)


def all_outputs(outputs: Any, *target: Tensor) -> Tensor:
    """Every logit of a sample, (n, C)."""
    return logits_of(outputs)


def _regression(outputs: Any, *target: Tensor) -> Tensor:
    """Every number that the model predicts, (n, K)."""
    predicted = logits_of(outputs)
    return predicted.flatten(1) if predicted.dim() > 1 else predicted


def _likelihood(outputs: Any, tokens: Tensor) -> Tensor:
    """The mean log-likelihood of a sequence's next tokens, (n,).

    Logits (n, T, V) at a position are about the token after it; tokens (n, T) of −100 are ignored,
    as in transformers' language models.
    """
    return _mean_likelihood(logits_of(outputs)[:, :-1], tokens[:, 1:])


def _likelihood_in_place(outputs: Any, labels: Tensor) -> Tensor:
    """The mean log-likelihood of a sequence's labels, (n,).

    Logits (n, T, V) at a position are about the label (n, T) at the same one, as in taggers, masked
    language models and encoder-decoders; labels of −100 are ignored.
    """
    return _mean_likelihood(logits_of(outputs), labels)


def _mean_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Over the labels that are not ignored, (n, T, V) and (n, T) → (n,); zero if all are."""
    each, counts = _likelihoods(logits, labels)
    return each.sum(1) / counts.sum(1).clamp_min(1)


def _likelihoods(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The log-likelihood of every label, (n, T), zero where it is ignored; and where it is not."""
    counts = labels != _IGNORED
    chosen = labels.long().clamp_min(0).unsqueeze(-1)
    return log_softmax(logits, -1).gather(-1, chosen).squeeze(-1) * counts, counts


_OUTPUTS: dict[str, Output] = {
    "class": true_class_output,
    "regression": _regression,
    "likelihood": _likelihood,
    "tokens": _likelihood_in_place,
}


def randomised(
    output: Output, outputs: MomentOutputs, tried: Sequence[tuple[Any, Tensor | None]]
) -> tuple[Output, list[tuple[int, ...]]]:
    """One scalar per sample, whose moments stand for those of all outputs or the Fisher matrix.

    Arguments:
        output: the protected scalars.
        outputs: "all", "fisher" or "mixed"; the same for regression, and for a function of the
            user's.
        tried: outputs and target of a few samples, for each shape.

    Returns:
        a function of the outputs, random numbers in [0, 1) and the target to (n,); and for each
        shape how many of these numbers a sample needs.
    """
    likelihoods: dict[Output, Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]] = {
        true_class_output: lambda logits, target: (logits, None),
        _likelihood: lambda logits, tokens: (logits[:, :-1], tokens[:, 1:] != _IGNORED),
        _likelihood_in_place: lambda logits, labels: (logits, labels != _IGNORED),
    }
    if outputs in ("fisher", "mixed") and output in likelihoods:
        labelled = likelihoods[output]
        likelihood = drawn_likelihood if outputs == "fisher" else mixed_likelihood

        def drawn(outputs: Any, uniform: Tensor, target: Tensor) -> Tensor:
            logits, counted = labelled(logits_of(outputs), target)
            return likelihood(logits, uniform, counted)

        sizes = [labelled(logits_of(z), t)[0].shape[1:-1] for z, t in tried if t is not None]
        return drawn, [tuple(size) for size in sizes]
    scalars = all_outputs if output is true_class_output else output

    def combined(outputs: Any, uniform: Tensor, *target: Tensor) -> Tensor:
        found = scalars(outputs, *target)
        found = found.unsqueeze(1) if found.dim() == 1 else found
        return probed(found, (uniform >= 0.5).to(found) * 2 - 1)

    counts = [scalars(*((z,) if t is None else (z, t))).shape[1:] for z, t in tried]
    return combined, [tuple(count) or (1,) for count in counts]


def label_count(output: Named | Output | None, targets: Iterable[Tensor | None]) -> int:
    """The labels of sequences that are not ignored; for other outputs, the number of samples."""
    labels = [target for target in targets if target is not None]
    if output == "likelihood":
        labels = [tokens[..., 1:] for tokens in labels]
    if output in _SEQUENCES:
        return sum(int((some != _IGNORED).sum()) for some in labels)
    return sum(map(len, labels))


def require_labels(output: Named | Output | None, count: int) -> None:
    """Reject sequences without labels, which would protect nothing."""
    if output in _SEQUENCES and not count:
        what = "next token" if output == "likelihood" else "label"
        raise DataError(f"there is no {what} to protect: all are {_IGNORED}, or none follows")


def chosen_output(output: Named | Output | None, model: nn.Module) -> Named | Output | None:
    """The user's choice, or the one that fits a model of transformers; an unknown one is rejected.

    Models that generate text protect the likelihood of their tokens, as do masked language models
    and taggers; for all others None: outputs and target tell.
    """
    known = output is None or callable(output) or (isinstance(output, str) and output in _OUTPUTS)
    require(known, "output", output, f"{', '.join(map(repr, _OUTPUTS))} or a function", _OUTPUTS)
    config = getattr(model, "config", None)
    if output == "likelihood" and getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            "output must be 'tokens' for an encoder-decoder, not 'likelihood': its logits are "
            "about the label at the same position, not about the next one"
        )
    return _usual_output(model) if output is None else output


def _usual_output(model: Any) -> Named | None:
    """The output that fits a model's class and configuration, in the terms of transformers."""
    adapted = getattr(model, "get_base_model", None)  # inside the adapters of peft
    model = adapted() if callable(adapted) else model
    config = getattr(model, "config", None)
    generates = getattr(model, "can_generate", None)
    if config is not None and callable(generates) and generates():
        return "tokens" if getattr(config, "is_encoder_decoder", False) else "likelihood"
    heads = ("ForMaskedLM", "ForTokenClassification")
    tags = any(kind.__name__.endswith(heads) for kind in type(model).__mro__)
    return "tokens" if config is not None and tags else None


def protected_output(
    output: Named | Output | None, outputs: Any, target: Tensor | None, targets: Tensor | None
) -> Output:
    """The scalars to protect: the user's choice, or the one that fits outputs and target.

    Arguments:
        output: the choice.
        outputs, target: of a few samples.
        targets: of all samples.
    """
    if isinstance(output, str):
        _check_target(output, outputs, targets)
        return _OUTPUTS[output]
    if output is not None:
        _check_scalars(output, outputs, target)
        return output
    logits = logits_of(outputs)
    _reject_unusual_labels(logits, targets)
    if target is None or target.is_floating_point():
        return _regression
    if logits.dim() == 2 and target.dim() == 1:
        _check_target("class", outputs, targets)
        return true_class_output
    raise ConfigError(
        f"outputs {tuple(logits.shape)} with target {tuple(target.shape)}: say with output= what "
        f"to protect, {_CHOICE}, or a function of outputs and target"
    )


def compared_outputs(
    output: Named | Output | None, outputs: Any, target: Tensor | None, targets: Tensor | None
) -> dict[str, Tensor]:
    """What tells how far outputs have moved between two times.

    A classifier's "logits" (n, C) and predicted "classes" (n,). For sequences the log-likelihood
    of each label and the predicted one, as "values" and "classes" (n, T), NaN and −1 where it is
    ignored. Otherwise the protected scalars, "values" (n, K), and the "classes" if there are any;
    every number of the outputs if a method that protects none has outputs of another kind.

    Arguments:
        output, outputs, target, targets: as of `protected_output`.
    """
    try:
        scalars = protected_output(output, outputs, target, targets)
    except ConfigError:
        scalars = _regression
    if target is not None and scalars in (_likelihood, _likelihood_in_place):
        logits = logits_of(outputs)
        if scalars is _likelihood:
            logits, target = logits[:, :-1], target[:, 1:]
        each, counts = _likelihoods(logits, target)
        values, classes = each.where(counts, torch.nan), logits.argmax(-1).where(counts, -1)
        return {"values": values, "classes": classes}
    if scalars is true_class_output:
        logits = logits_of(outputs)
        return {"logits": logits, "classes": logits.argmax(1)}
    values = scalars(outputs) if target is None else scalars(outputs, target)
    found = {"values": values.unsqueeze(1) if values.dim() == 1 else values}
    if target is not None and target.dim() == 1 and not target.is_floating_point():
        with suppress(ConfigError):  # a function of the user's needs no logits
            logits = logits_of(outputs)
            found |= {"classes": logits.argmax(1)} if logits.dim() == 2 else {}
    return found


def _check_target(output: str, outputs: Any, targets: Tensor | None) -> None:
    """Reject targets of another shape than the outputs, or out of their range."""
    logits = logits_of(outputs)
    if output == "regression":
        return
    kind = "none" if targets is None else f"{tuple(targets.shape)} of {targets.dtype}"
    integer = targets is not None and not targets.is_floating_point()
    if output == "class":
        fits = integer and logits.dim() == 2 and targets is not None and targets.dim() == 1
        accepted = "labels (n,) of an integer type, for outputs (n, C)"
    else:
        fits = integer and logits.dim() == 3 and targets is not None and targets.dim() == 2
        fits = fits and targets is not None and targets.shape[1] == logits.shape[1]
        accepted = "tokens (n, T) of an integer type, for outputs (n, T, V)"
    got = f"{kind}, for outputs {('n', *logits.shape[1:])}".replace("'", "")
    if not fits or targets is None:
        _reject_unusual_labels(logits, targets)
        raise ConfigError(f"the target of output={output!r} must be {accepted}, not {got}")
    labels = targets if output == "class" else targets[targets != _IGNORED]
    if labels.numel():
        low, high = int(labels.min()), int(labels.max())
        inside = low >= 0 and high < logits.shape[-1]
        what = "labels" if output == "class" else "tokens"
        classes = logits.shape[-1]
        accepted = f"in [0, {classes}), as the model has {classes} outputs"
        require(inside, what, f"{low} to {high}", accepted)


def _reject_unusual_labels(logits: Tensor, targets: Tensor | None) -> None:
    """Reject labels (n, 1), one-hot labels, and classes for a single logit, and say what to do.

    Arguments:
        logits: of a few samples, (n, C), or a single one (n,).
        targets: of all samples.
    """
    if targets is None or logits.dim() not in (1, 2):
        return
    classes, shape = logits[0].numel(), targets.shape[1:]
    if not targets.is_floating_point() and shape in ((), (1,)):
        if classes == 1:
            raise ConfigError(
                f"labels of {targets.dtype} need a logit for each class, and the model has one "
                "alone: for a binary classifier protect it with output='regression', and for a "
                "method that uses a loss give loss=, for example lambda outputs, target: "
                "binary_cross_entropy_with_logits(outputs, target.view_as(outputs).float())"
            )
        if shape == (1,):
            raise ConfigError(
                "labels have shape (n, 1), and classes are (n,): "
                "unpack=lambda batch: (batch[0], batch[1].squeeze(1))"
            )
    elif shape == (classes,) and classes > 1 and _is_one_hot(targets):
        raise ConfigError(
            f"the target {('n', *shape)} is one-hot, and classes are indices (n,): ".replace(
                "'", ""
            )
            + "unpack=lambda batch: (batch[0], batch[1].argmax(1)); if these are numbers to "
            "predict, say output='regression', and give loss= to a method that uses one"
        )


def _reject_binary(logits: Tensor, targets: Tensor) -> None:
    """Reject targets 0 and 1 for real outputs, whose loss need not be the squared error."""
    single = logits.shape[1:] in ((), (1,)) and targets.shape[1:] in ((), (1,))
    several = targets.is_floating_point() and logits.shape[1:] == targets.shape[1:]
    if (single or several) and targets.unique().tolist() == [0, 1]:
        raise ConfigError(
            "the targets are 0 or 1 and the outputs real numbers, whose loss may be binary "
            "cross-entropy or the squared error: give loss=, for example lambda outputs, target: "
            "binary_cross_entropy_with_logits(outputs, target.view_as(outputs))"
        )


def _is_one_hot(targets: Tensor) -> bool:
    return bool(((targets == 0) | (targets == 1)).all() and (targets.sum(1) == 1).all())


def _check_scalars(output: Output, outputs: Any, target: Tensor | None) -> None:
    """Reject a function that does not return one number, or K, for each sample."""
    try:
        value = output(outputs) if target is None else output(outputs, target)
    except (TypeError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        reason = first_line(error)
        raise ConfigError(
            f"the function output= fails on the model's outputs and the target: {reason}"
        ) from error
    count = _batch_size(outputs, target)
    fits = isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (1, 2)
    fits = fits and (count is None or len(value) == count)
    accepted = "real numbers (n,) or (n, K) for n samples"
    require(fits, "what the function output= returns", _described(value), accepted)


def _batch_size(outputs: Any, target: Tensor | None) -> int | None:
    """How many samples there are, None if unknown."""
    if target is not None:
        return len(target)
    several = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
    for value in several if isinstance(several, tuple | list) else [several]:
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    return None


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value))}"
    return f"a {type(value).__name__}"


@final
@dataclass(frozen=True)
class Loss:
    """The loss of a model's outputs and the target.

    Arguments:
        function: the user's, of a batch; None for cross-entropy or squared error.
        output: the protected scalars, which tell how a sequence's labels are aligned with logits.
    """

    function: LossFn | None
    output: Named | Output | None

    def mean(self, outputs: Any, target: Tensor | None) -> Tensor:
        """The loss of a batch, a scalar."""
        if self.function is None:
            return self._default(outputs, target).mean()
        value = self.function(outputs) if target is None else self.function(outputs, target)
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        single = isinstance(value, Tensor) and value.numel() == 1
        require(single, "what loss= returns", shape, "one number")
        return value.reshape(())

    def of_each(self, outputs: Any, target: Tensor | None) -> Tensor:
        """Each sample's loss, (n,); with a user's loss, that of a batch of one sample."""
        if self.function is None:
            return self._default(outputs, target)
        count = _batch_size(outputs, target)
        if count is None:
            raise ConfigError("loss= needs batches with a target here, to tell samples apart")
        return torch.stack([self.mean(*_one(outputs, target, i)) for i in range(count)])

    def check(self, outputs: Any, target: Tensor | None, targets: Tensor | None) -> None:
        """Reject samples that have no loss.

        Arguments:
            outputs, target: of a few samples.
            targets: of all samples.
        """
        if self.function is None and targets is not None:
            logits = logits_of(outputs)
            _reject_unusual_labels(logits, targets)
            _reject_binary(logits, targets)
        if self.function is None and targets is not None and not targets.is_floating_point():
            kind = "class" if targets.dim() == 1 else self.output
            # Before the loss is computed: a label out of range is no index.
            if logits_of(outputs).dim() == targets.dim() + 1 and isinstance(kind, str):
                _check_target(kind, outputs, targets)
        self.mean(outputs, target)

    def of_constant(self, targets: Sequence[Tensor | None]) -> float | None:
        """The least mean loss of outputs that are the same for all samples.

        The entropy of the labels' frequencies, or the variance of real targets.

        Arguments:
            targets: of parts of the samples, (n, *) each.

        Returns:
            None for a loss of the user's, and without targets.
        """
        known = [target for target in targets if target is not None]
        if self.function is not None or not known:
            return None
        if known[0].is_floating_point():
            alike = len({target.shape[1:] for target in known}) == 1
            return float(torch.cat(known).var(0, correction=0).mean()) if alike else None
        known = [tokens[:, 1:] for tokens in known] if self.output == "likelihood" else known
        labels = torch.cat([some.flatten() for some in known])
        shares = labels[labels != _IGNORED].unique(return_counts=True)[1].double()
        shares = shares / shares.sum()
        return float(-(shares * shares.log()).sum())

    def require_labels(self, count: int) -> None:
        """Reject samples without labels, unless the loss is the user's."""
        if self.function is None:
            require_labels(self.output, count)

    def _default(self, outputs: Any, target: Tensor | None) -> Tensor:
        """(n,): cross-entropy for labels and tokens, squared error for real targets."""
        logits = logits_of(outputs)
        if target is None:
            raise ConfigError("this method follows a loss: batches need a target, or give loss=")
        if target.is_floating_point() and logits.numel() == target.numel():
            each = mse_loss(logits.reshape(target.shape), target, reduction="none")
            return each.flatten(1).mean(1) if each.dim() > 1 else each
        if not target.is_floating_point() and logits.dim() == 3 and target.dim() == 2:
            if self.output in _SEQUENCES:
                return -_OUTPUTS[str(self.output)](outputs, target)
            raise ConfigError(
                f"the loss of outputs {tuple(logits.shape)} with target {tuple(target.shape)} may "
                f"be one of several: give loss=, or output={_CHOICE}"
            )
        if not target.is_floating_point() and logits.dim() == 2 and target.dim() == 1:
            return cross_entropy(logits, target.long(), reduction="none")
        raise ConfigError(
            f"no usual loss for outputs {tuple(logits.shape)} and target {tuple(target.shape)} of "
            f"{target.dtype}: give loss=, a function of outputs and target"
        )


def _one(outputs: Any, target: Tensor | None, i: int) -> tuple[Any, Tensor | None]:
    """The outputs and target of sample i alone."""

    def cut(value: Any) -> Any:
        return value[i : i + 1] if isinstance(value, Tensor) and value.dim() else value

    if isinstance(outputs, Mapping):
        one: Any = type(outputs)(**{key: cut(value) for key, value in outputs.items()})
    elif isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        one = type(outputs)(*map(cut, outputs))
    elif isinstance(outputs, tuple | list):
        one = type(outputs)(map(cut, outputs))
    elif isinstance(outputs, Tensor):
        one = cut(outputs)
    else:
        raise ConfigError(
            f"the model returns a {type(outputs).__name__}, which cannot be taken apart sample by "
            "sample; let it return a tensor, a tuple or a dict"
        )
    return one, None if target is None else target[i : i + 1]
