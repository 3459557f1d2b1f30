"""`tangent_features`: checks a user's model, samples and choice of parameters."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from forgetless.linalg import is_under
from forgetless.support.validation import ConfigError, DataError, beginnings, first_line, require
from forgetless.tangent.evaluation import Batch, Evaluation, Scalar, close, true_class
from forgetless.tangent.features import Chunks, TangentFeatures

Inputs = Tensor | tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]
Params = nn.Module | str | Iterable[str | nn.Parameter]

_COMPARED = 4  # samples that are also run alone


def tangent_features(
    model: nn.Module,
    x: Inputs,
    y: Tensor | None = None,
    *,
    params: Params | None = None,
    chunk: int | None = None,
) -> TangentFeatures:
    """The tangent features φ(X) of a model, an operator with one row per sample.

    φ_i = ∂f_{y_i}(x_i)/∂θ, the gradient of the true-class output. Without labels every output has
    a row: row i · C + c is ∂f_c(x_i)/∂θ. Weights and train/eval modes are the present ones, later
    changes have no effect; the inputs are not copied.

    Arguments:
        model: from inputs to outputs (n, C), or (n,); any module whose output for a sample does
            not depend on the other samples.
        x: inputs (n, *), a tuple of them (positional arguments) or a mapping (keyword arguments).
        y: labels (n,), integers in [0, C), or None.
        params: θ: None for all parameters that require a gradient; a submodule; names or prefixes
            of names (`"body"` is all of `body.*`); parameters. The columns have this order.
        chunk: samples that go through the model at once; by default as many as fit well.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> phi = tangent_features(model, torch.ones(5, 3), torch.tensor([0, 1, 0, 1, 1]))
        >>> phi.shape, phi.gram().shape, (phi @ torch.zeros(8)).shape
        ((5, 8), torch.Size([5, 5]), torch.Size([5]))
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    good = chunk is None or (isinstance(chunk, int) and chunk >= 1)
    require(good, "chunk", chunk, "None or an integer of at least 1")
    names = chosen_names(model, params)
    batch = _batch(x)
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    _check_values(values, names)
    _check_layers(model)
    scalar: Scalar = lambda outputs: outputs  # noqa: E731
    if y is not None:
        labels = _labels(y, len(batch)).to(values[names[0]].device)
        batch, scalar = Batch(batch.args, batch.kwargs, (labels,)), true_class
    evaluation = Evaluation.at(model, values, names, batch, scalar)
    classes = _classes(evaluation)
    if y is not None:
        require(classes is not None, "y", "labels", "None for a model with outputs (n,)")
        low, high = int(y.min()), int(y.max())
        accepted = f"in [0, {classes}), the model's outputs"
        require(low >= 0 and high < (classes or 0), "y", f"labels {low} to {high}", accepted)
    return TangentFeatures(Chunks([evaluation], chunk))


def chosen_names(model: nn.Module, params: Params | None) -> tuple[str, ...]:
    """The names of the chosen parameters, each once, in the order of the choice."""
    own = dict(model.named_parameters())
    name_of: dict[Tensor, str] = {p: name for name, p in own.items()}
    aliases = {a: name_of[p] for a, p in model.named_parameters(remove_duplicate=False)}
    if params is None:
        names = [name for name, p in own.items() if p.requires_grad]
        if not names:
            raise ConfigError("model must have parameters that require a gradient, and has none")
        return tuple(names)
    if isinstance(params, nn.Module):
        params = list(params.parameters())
    chosen: list[str] = []
    for one in [params] if isinstance(params, str | Tensor) else params:
        if isinstance(one, str):
            found = [n for a, n in aliases.items() if is_under(a, [one])]
            has = f"names or prefixes of names, such as {next(iter(own), 'none')!r}"
            require(bool(found), "params", one, has, beginnings(aliases))
            chosen += found
        elif isinstance(one, Tensor):
            if one not in name_of:
                raise ConfigError(f"params has a tensor {tuple(one.shape)} not of this model")
            chosen.append(name_of[one])
        else:
            raise ConfigError(f"params must be names or parameters, not {type(one).__name__}")
    if not chosen:
        raise ConfigError("params must name at least one parameter, and is empty")
    return tuple(dict.fromkeys(chosen))


def _batch(x: Inputs) -> Batch:
    """Positional and keyword arguments, finite tensors with the same number of samples."""
    if isinstance(x, Tensor):
        batch = Batch((x,), {})
    elif isinstance(x, Mapping):
        batch = Batch((), dict(x))
    elif isinstance(x, tuple | list):
        batch = Batch(tuple(x), {})
    else:
        raise ConfigError(f"x must be a tensor, a tuple or a dict of them, not {type(x).__name__}")
    every: list[object] = [*batch.args, *batch.kwargs.values()]
    require(bool(every), "x", x, "at least one tensor")
    for one in every:
        came = f"a tensor {tuple(one.shape)}" if isinstance(one, Tensor) else type(one).__name__
        fits = isinstance(one, Tensor) and one.dim() >= 1
        require(fits, "x", came, "tensors with a leading dimension of samples")
    tensors = [one for one in every if isinstance(one, Tensor)]
    sizes = {len(one) for one in tensors}
    require(len(sizes) == 1, "x", f"sizes {sorted(sizes)}", "tensors of equally many samples")
    require(sizes != {0}, "x", "no samples", "at least one sample")
    if not all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point()):
        raise DataError("x must be finite, and has NaN or infinite entries")
    return batch


def require_one_precision(parameters: Iterable[Tensor]) -> None:
    """Reject a mixture of float32 and float64; half precision counts as float32."""
    kinds = {torch.promote_types(p.dtype, torch.float32) for p in parameters}
    if len(kinds) > 1:
        words = " and ".join(sorted(str(kind)[6:] for kind in kinds))
        raise ConfigError(f"the chosen parameters must be of one precision, not {words}")


def _check_values(values: Mapping[str, Tensor], names: tuple[str, ...]) -> None:
    """Require chosen parameters of one real dtype and device, and finite values everywhere."""
    for name in names:
        kind = values[name].dtype
        require(kind.is_floating_point, f"parameter {name}", str(kind), "of real numbers")
    devices = {str(values[name].device) for name in names}
    require(len(devices) == 1, "the chosen parameters", sorted(devices), "on one device")
    for name, value in values.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise DataError(f"the model's {name} must be finite, and has NaN or infinite entries")
    require_one_precision(values[name] for name in names)


def _check_layers(model: nn.Module) -> None:
    """Reject layers known to mix samples or to draw random numbers, by name."""
    for name, layer in model.named_modules():
        where = f"{type(layer).__name__} {name!r}"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            if layer.training or layer.running_mean is None:
                tracked = layer.track_running_stats
                advice = "call model.eval()" if tracked else "track its statistics"
                raise ConfigError(f"{where} makes outputs depend on the batch; {advice}")
        elif isinstance(layer, nn.modules.dropout._DropoutNd) and layer.training and layer.p > 0:
            raise ConfigError(f"{where} makes outputs random; call model.eval()")


def _labels(y: Tensor, n: int) -> Tensor:
    if not isinstance(y, Tensor):
        raise ConfigError(f"y must be a tensor of integers, not {type(y).__name__}")
    kind = y.dtype
    whole = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
    require(whole, "y", str(kind), "of an integer dtype")
    require(tuple(y.shape) == (n,), "y", f"a tensor {tuple(y.shape)}", f"of shape ({n},), as x")
    return y.long()


def _classes(evaluation: Evaluation) -> int | None:
    """C, or None for outputs (n,), once outputs are known not to depend on other samples."""
    some = evaluation.select(slice(0, _COMPARED))
    try:
        with evaluation.running(), torch.no_grad():
            outputs = some.outputs({})
            alone = [some.select(slice(i, i + 1)).outputs({}) for i in range(some.n)]
            again = some.outputs({})
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = first_line(error)
        raise ConfigError(f"the model does not take these inputs: {reason}") from error
    if not isinstance(outputs, Tensor):
        kind = type(outputs).__name__
        raise ConfigError(f"the model must return one tensor, not {kind}: wrap it in a module")
    fits = outputs.dim() in (1, 2) and len(outputs) == some.n
    got = f"{tuple(outputs.shape)} for {some.n} samples"
    require(fits, "the model's outputs", got, "of shape (n, C) or (n,)")
    real = outputs.is_floating_point()
    require(real, "the model's outputs", str(outputs.dtype), "real numbers")
    if not bool(outputs.isfinite().all()):
        raise DataError("the model's outputs are NaN or infinite")
    if not close(outputs, again):
        raise ConfigError("the model's outputs are random; call model.eval()")
    alike = all(a.shape == outputs[:1].shape for a in alone)
    if not alike or not close(outputs, torch.cat(alone)):
        raise ConfigError("a sample's outputs depend on the batch; call model.eval()")
    return outputs.shape[1] if outputs.dim() == 2 else None
