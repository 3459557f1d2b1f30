"""Layers' inputs as matrices, against unfolding by hand and against the layers' outputs."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import pad, unfold

from forgetless import ConfigError
from forgetless.tangent import Batch, input_moments, inputs, layer_inputs

from . import networks as net
from .reference import built, integers, random


def values_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def inputs_of(model, *x, **options):
    return layer_inputs(model, values_of(model), [Batch((one,), {}) for one in x], **options)


def by_hand(layer, x):
    """The patches of a convolution, one sample, position and group at a time."""
    size, step, gap, padding = layer.kernel_size, layer.stride, layer.dilation, layer.padding
    x = pad(x, [p for axis in reversed(padding) for p in (axis, axis)])
    spans = [gap[a] * (size[a] - 1) + 1 for a in range(len(size))]
    counts = [(x.shape[2 + a] - spans[a]) // step[a] + 1 for a in range(len(size))]
    wide = layer.in_channels // layer.groups
    rows = []
    for sample in x:
        for place in product(*map(range, counts)):
            starts = [place[a] * step[a] for a in range(len(size))]
            cut = tuple(slice(s, s + span, g) for s, span, g in zip(starts, spans, gap))
            for group in range(layer.groups):
                channels = slice(group * wide, (group + 1) * wide)
                rows.append(sample[(channels, *cut)].flatten())
    return torch.stack(rows)


CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (4, 9)),
    "2d": (nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, 5, 6)),
    "2d depthwise": (nn.Conv2d(3, 6, 2, groups=3), (3, 4, 4)),
    "3d": (nn.Conv3d(2, 4, 2, stride=(1, 2, 1), padding=1, groups=2), (2, 3, 4, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_patches_of_convolutions(name):
    layer, shape = CONVOLUTIONS[name]
    layer, x = layer.double(), random(3, *shape)
    model = nn.Sequential(layer)
    found = inputs_of(model, x)["0.weight"]
    torch.testing.assert_close(found, by_hand(layer, x), rtol=0, atol=0)
    assert found.shape[1] == layer.weight[0].numel()
    if layer.groups == 1 and x.dim() == 4:
        options = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        expected = unfold(x, *options).mT.flatten(0, 1)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # A Wᵀ + b, each group's patches with its own filters.
    per_group = found.view(-1, layer.groups, found.shape[1])
    filters = layer.weight.flatten(1).view(layer.groups, -1, found.shape[1])
    outputs = torch.einsum("ngd,god->ngo", per_group, filters).flatten(1) + layer.bias
    expected = layer(x).movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padded_patches_give_the_outputs(mode):
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode).double()
    x = random(2, 2, 5, 5)
    found = inputs_of(nn.Sequential(layer), x)["0.weight"]
    expected = layer(x).movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(found @ layer.weight.flatten(1).T + layer.bias, expected)


def test_a_perceptrons_inputs_and_those_of_sequences():
    model = built(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = random(6, 7, 4)
    found = inputs_of(model, x)
    assert list(found) == ["0.weight", "2.weight"]
    torch.testing.assert_close(found["0.weight"], x.view(42, 4), rtol=0, atol=0)
    hidden = torch.tanh(model[0](x)).view(42, 5)
    torch.testing.assert_close(found["2.weight"], hidden, rtol=0, atol=0)
    assert not any(rows.requires_grad for rows in found.values())


def test_given_weights_take_the_place_of_the_networks_own():
    model = built(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)))
    values = {name: random(*p.shape, seed=7) for name, p in model.named_parameters()}
    x = random(6, 4)
    found = layer_inputs(model, values, [Batch((), {"input": x})])
    expected = x @ values["0.weight"].T + values["0.bias"]
    torch.testing.assert_close(found["1.weight"], expected)
    assert list(layer_inputs(model, values, [Batch((x,), {})], names=["1.weight"])) == ["1.weight"]


def test_a_transformer_leaves_embeddings_and_norms_out():
    model, tokens = built(net.transformer), integers(net.V, 6, 5)
    found = inputs_of(model, tokens)
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)} - {"out"}
    # The head's weight is the embedding's, and goes by that name.
    assert set(found) == {f"{name}.weight" for name in linear} | {"tokens.weight"}
    assert found["tokens.weight"].shape == (30, net.D)
    assert found["mlp.2.weight"].shape == (30, 7)


def test_runs_of_a_layer_and_batches_of_other_shapes_are_laid_end_to_end():
    model = built(net.recurrence)
    first, second = random(5, 4), random(2, 4, seed=1)
    found = inputs_of(model, first, second)
    assert found["again.weight"].shape == (3 * 7, 5)
    alone = [inputs_of(model, x)["again.weight"] for x in (first, second)]
    torch.testing.assert_close(found["again.weight"], torch.cat(alone), rtol=0, atol=0)
    torch.testing.assert_close(alone[0][:5], model.first(first), rtol=1e-12, atol=1e-12)
    lengths = built(lambda: nn.Sequential(nn.Linear(3, 2)))
    assert inputs_of(lengths, random(2, 5, 3), random(4, 1, 3))["0.weight"].shape == (14, 3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("present_mode", [True, False])
def test_the_mode_and_what_stays_as_it_was(training, present_mode):
    model = built(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))).train(training)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    x = random(8, 4)
    found = inputs_of(model, x, present_mode=present_mode)["1.weight"]
    assert model.training is training
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert not model[1]._forward_pre_hooks
    norm = nn.BatchNorm1d(4).double().train(training and present_mode)
    norm.load_state_dict(model[0].state_dict())
    torch.testing.assert_close(found, norm(x).detach(), rtol=1e-12, atol=1e-12)


def test_subclasses_and_parts_that_do_not_run_are_left_out():
    assert inputs_of(built(lambda: nn.Sequential(net.Doubled(4, 3))), random(2, 4)) == {}
    found = inputs_of(built(lambda: net.multihead(True)), random(2, 4, net.D))
    assert list(found) == ["last.weight"]


def moments_by_rows(model, *x):
    """The means of outer products of the rows, with ones for biases."""
    found = {}
    for name, rows in inputs_of(model, *x).items():
        if name.replace("weight", "bias") in dict(model.named_parameters()):
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        found[name] = rows.T @ rows / len(rows)
    return found


def moments_of(model, *x, names=None):
    names = names or [name for name, _ in model.named_parameters()]
    return input_moments(model, values_of(model), [Batch((one,), {}) for one in x], names=names)


NETWORKS = {
    "sequence": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (7, 4)),
    "no bias": (lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 3)), (4,)),
    "groups": (lambda: nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Conv2d(6, 2, 2)), (4, 5, 5)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_moments_are_those_of_the_rows_in_parts_too(name, monkeypatch):
    make, shape = NETWORKS[name]
    model, x = built(make), (random(40, *shape), random(3, *shape, seed=1))
    expected = moments_by_rows(model, *x)
    for most in (512, 7, 1):
        monkeypatch.setattr(inputs, "_MOST", most)
        found = moments_of(model, *x)
        torch.testing.assert_close(found.inputs, expected, rtol=1e-10, atol=1e-12)
        assert found.others == frozenset()
    assert all(found.biases[w] == w.replace("weight", "bias") for w in found.biases)
    assert set(found.biases) == {n for n in expected if len(expected[n]) > found_width(model, n)}


def found_width(model, name):
    return dict(model.named_parameters())[name][0].numel()


def test_of_very_many_rows_some_stand_for_all_in_moments(monkeypatch):
    model, x = built(lambda: nn.Sequential(nn.Conv2d(2, 3, 3))), random(64, 2, 10, 10)
    whole = moments_of(model, x).inputs["0.weight"]
    monkeypatch.setattr(inputs, "_AT_LEAST", 600)
    some = moments_of(model, x).inputs["0.weight"]
    assert not torch.equal(whole, some)
    assert (whole - some).norm() < 0.25 * whole.norm()


def test_what_is_used_in_another_way_is_named_and_what_is_not_used_is_not():
    model, tokens = built(net.transformer), integers(net.V, 6, 5)
    found = moments_of(model, tokens)
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)} - {"out"}
    assert set(found.inputs) == {f"{name}.weight" for name in linear}
    biases = {f"{n}.bias" for n in linear if f"{n}.bias" in dict(model.named_parameters())}
    assert set(found.biases.values()) == biases
    every = {name for name, _ in model.named_parameters()}
    assert found.others == every - set(found.inputs) - biases
    assert "tokens.weight" in found.others

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            return self.used(x)

    found = moments_of(built(Branches), random(5, 4))
    assert (set(found.inputs), found.others) == ({"used.weight"}, frozenset())


def test_a_bias_whose_weight_is_not_wanted_and_biases_of_one_weight():
    model, x = built(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), random(6, 4)
    found = moments_of(model, x, names=["0.bias", "1.weight"])
    assert (set(found.inputs), found.biases, found.others) == ({"1.weight"}, {}, {"0.bias"})
    model[1].weight = model[0].weight
    found = moments_of(model, x)
    assert (set(found.inputs), found.biases) == ({"0.weight"}, {})
    assert found.others == {"0.bias", "1.bias"}
    rows = torch.cat([x, model[0](x)]).detach()
    torch.testing.assert_close(found.inputs["0.weight"], rows.T @ rows / 12)


def test_moments_leave_the_network_as_it_was():
    model = built(lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
    model.train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    moments_of(model, random(8, 4))
    assert model.training
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_parts_of_a_batch_that_norms_see_are_of_one_size(monkeypatch):
    """Nine samples in parts of at most four are three and three, not four, four and one."""
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)).double()
    monkeypatch.setattr(inputs, "_MOST", 4)
    x = random(9, 4)
    found = moments_of(model, x).inputs["1.weight"]
    rows = torch.cat([nn.functional.batch_norm(p, None, None, training=True) for p in x.split(3)])
    rows = torch.cat([rows, torch.ones(9, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(found, rows.T @ rows / 9)
    with pytest.raises(ConfigError, match="more than 1 value per channel"):
        moments_of(model, x[:1])
