"""The reasons of forgetting, against dense matrices and against what the run itself noted."""

import base64
import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from forgetless import TraceError, tangent_features, theory
from forgetless.launch.rebuild import rebuild, samples_of
from forgetless.report.analysis import _SeedRun, analyse, cached_analysis, known_analysis
from forgetless.subspace import DENSE, KroneckerSubspace
from forgetless.trace import load_trace

SAMPLES = 25


def dense_features(trace, at: int, task: int, names=None) -> torch.Tensor:
    """φ of the same samples as the analysis takes, as a matrix in float64."""
    made = rebuild(trace)
    model = made.network(trace.weights(0, at)).double().eval()
    split = made.tasks.task(task, [0]).train
    index = torch.linspace(0, len(split) - 1, SAMPLES).round().long()
    inputs, labels = split.take(index.unsqueeze(0))
    return tangent_features(model, inputs[0].double(), labels[0], params=names).dense()


@pytest.mark.parametrize("method", ["sgd", "ogd", "pca-ogd"])
def test_the_overlap_is_that_of_the_dense_matrices(digits_run, method):
    trace = digits_run("rotated-digits", method)
    found = analyse(trace, samples=SAMPLES)
    directions, ranks = None, [0, 0, 0]
    if method != "sgd":
        directions, ranks = trace.state(0)["directions"].double(), trace.state(0)["ranks"]
    assert found.projected is (method != "sgd")
    for s, k in [(0, 1), (0, 2), (1, 2)]:
        sides = [theory.factors(dense_features(trace, s, t), rtol=3e-4) for t in (s, k)]
        basis = None if directions is None else directions[: int(sum(ranks[:k]))]
        wanted = theory.overlap_spectrum(theory.overlap(*sides, basis))
        np.testing.assert_allclose(found.overlap[f"{s}-{k}"], wanted, atol=2e-3)
        left = sides[0].dense()
        left = left if basis is None else left - left @ basis.T @ basis
        share = left.square().sum() / sides[0].s.square().sum()
        assert found.unprotected[f"{s}-{k}"] == pytest.approx(float(share), abs=1e-4)
    if method != "sgd":  # what is remembered takes overlap away
        plain = theory.overlap_spectrum(theory.overlap(*sides))
        assert np.mean(found.overlap["1-2"]) < 0.9 * float(plain.mean())


@pytest.mark.parametrize("storage", ["factored", "bfloat16"])
@pytest.mark.parametrize("method", ["ogd", "pca-ogd"])
def test_it_does_not_matter_how_directions_are_kept(digits_run, method, storage):
    dense = analyse(digits_run("rotated-digits", method), samples=SAMPLES)
    found = analyse(digits_run("rotated-digits", method, storage=storage), samples=SAMPLES)
    assert found.projected
    assert found.overlap.keys() == dense.overlap.keys()
    for pair, values in found.overlap.items():
        np.testing.assert_allclose(
            values, dense.overlap[pair], atol=2e-3 if storage == "factored" else 0.02
        )
    for one, other in zip(found.forecast, dense.forecast, strict=True):
        assert one.predicted == pytest.approx(other.predicted, abs=2.0)


def test_the_overlap_with_an_eigenbasis_is_that_of_its_dense_projection(digits_run):
    """What task 3 avoids is what a run of the first two tasks stored at its end."""
    trace, shorter = (digits_run("rotated-digits", "kron-ogd", tasks=tasks) for tasks in (3, 2))
    found = analyse(trace, samples=SAMPLES)
    assert found.projected
    sides = [dense_features(trace, 1, t) for t in (1, 2)]
    size = sides[0].shape[1]
    stored = KroneckerSubspace.restore([shorter.state(0)], torch.zeros(1, size).double(), DENSE)
    matrix = torch.cat([stored.project_out(row) for row in torch.eye(size).double().split(1)])
    left, right = (theory.factors(side, rtol=3e-4) for side in sides)
    wanted = theory.overlap_spectrum(left.v @ matrix @ right.v.T)
    np.testing.assert_allclose(found.overlap["1-2"], wanted, atol=2e-3)
    share = (sides[0] @ matrix).square().sum() / sides[0].square().sum()
    assert found.unprotected["1-2"] == pytest.approx(float(share), abs=1e-4)
    assert 0 < share < 0.2
    assert len(found.forecast) == 2
    assert all(variance.kept is None for variance in found.variance)  # not of one task


def test_heads_are_no_part_of_what_is_protected(digits_run):
    trace = digits_run("split-digits", "pca-ogd")
    found = analyse(trace, samples=SAMPLES)
    assert found.projected
    model = rebuild(trace).network(trace.weights(0, 0))
    names = [n for n, _ in model.named_parameters() if not n.startswith("head.")]
    basis = trace.state(0)["directions"].double()[: int(trace.state(0)["ranks"][0])]
    sides = [theory.factors(dense_features(trace, 0, t, names), rtol=3e-4) for t in (0, 1)]
    wanted = theory.overlap_spectrum(theory.overlap(*sides, basis))
    np.testing.assert_allclose(found.overlap["0-1"], wanted, atol=2e-3)
    assert found.forecast


def test_convolutions_and_batch_norm_are_taken_as_they_were_evaluated(digits_run):
    trace = digits_run("rotated-digits", "ogd", model="lenet", epochs=1, tasks=2)
    found = analyse(trace, samples=SAMPLES)
    sides = [theory.factors(dense_features(trace, 0, t), rtol=3e-4) for t in (0, 1)]
    basis = trace.state(0)["directions"].double()[: int(trace.state(0)["ranks"][0])]
    wanted = theory.overlap_spectrum(theory.overlap(*sides, basis))
    np.testing.assert_allclose(found.overlap["0-1"], wanted, atol=2e-3)
    assert len(found.forecast) == 1


def test_variance_and_kernel_are_those_of_the_theory(digits_run):
    trace = digits_run("rotated-digits", "pca-ogd")
    found = analyse(trace, samples=SAMPLES)
    grams = [dense_features(trace, at, 0) for at in range(3)]
    grams = [phi @ phi.T for phi in grams]
    wanted = [theory.kernel_change(grams[0], gram) for gram in grams]
    np.testing.assert_allclose(found.kernel[0], wanted, atol=1e-4)
    assert [len(row) for row in found.kernel] == [3, 2, 1]
    for task, variance in enumerate(found.variance):
        curve = np.array(variance.curve)
        assert variance.samples == len(curve) == 150  # all that the task has
        assert (np.diff(curve) >= -1e-9).all()
        assert curve[-1] == pytest.approx(1)
        assert variance.kept == int(trace.state(0)["ranks"][task])
    # The method looked at other samples of the same task; the share it kept is close.
    kept = found.variance[0].curve[found.variance[0].kept - 1]
    assert kept == pytest.approx(float(trace.state(0)["shares"][0]), abs=0.1)


def test_a_forecast_stands_beside_what_was_measured(digits_run):
    trace = digits_run("rotated-digits", "sgd")
    points = analyse(trace, samples=SAMPLES).forecast
    assert [(p.source, p.target) for p in points] == [(0, 1), (1, 2)]
    for p in points:
        accuracy = trace.accuracy[0]
        assert p.measured == accuracy[p.target, p.source] - accuracy[p.source, p.source]
        assert -100 <= p.predicted <= 100
        assert 0 <= p.trust <= 1
    assert analyse(digits_run("rotated-digits", "ewc"), samples=SAMPLES).forecast == []


def test_the_forecast_of_a_projecting_method_avoids_its_directions(digits_run):
    trace = digits_run("split-digits", "pca-ogd")
    replayed = _SeedRun.of(trace, rebuild(trace), SAMPLES)
    basis = replayed.basis(1)
    assert basis.shape[1] == sum(p.numel() for p in replayed.model.parameters())
    rows = trace.state(0)["directions"][: len(basis)]
    torch.testing.assert_close(basis.square().sum(1), rows.square().sum(1))
    heads = [p.numel() for n, p in replayed.model.named_parameters() if n.startswith("head.")]
    assert not basis[:, -sum(heads) :].any()


@pytest.mark.parametrize("setting", ["freeze", "unprotected"])
def test_layers_out_of_reach_have_no_part_in_the_forecast(digits_run, setting):
    trace = digits_run("rotated-digits", "ogd", **{setting: "body.1"})
    replayed = _SeedRun.of(trace, rebuild(trace), SAMPLES)
    sizes = {n: p.numel() for n, p in replayed.model.named_parameters()}
    first = sizes["body.1.weight"] + sizes["body.1.bias"]
    rows = trace.state(0)["directions"]
    assert rows.shape[1] == sum(sizes.values()) - first
    basis = replayed.basis(1)
    if setting == "unprotected":  # trained, but free to move
        assert not basis[:, :first].any()
        basis = basis[:, first:]
    torch.testing.assert_close(basis, rows[: len(basis)])
    points = analyse(trace, samples=SAMPLES).forecast
    assert [(p.source, p.target) for p in points] == [(0, 1), (1, 2)]


def test_runs_of_other_optimizers_are_not_forecast_as_if_by_sgd(digits_run):
    assert analyse(digits_run("rotated-digits", "sgd"), samples=SAMPLES).forecast
    trace = digits_run("rotated-digits", "sgd", momentum=0.9)
    assert analyse(trace, samples=SAMPLES).forecast == []


def test_the_images_are_those_that_were_lost(digits_run):
    trace = digits_run("rotated-digits", "sgd", step_degrees=45.0, epochs=8)
    found = analyse(trace, samples=SAMPLES)
    made = rebuild(trace)
    inputs, labels = samples_of(made.tasks.task(0, [0]).test)
    before, after = (made.network(trace.weights(0, t))(inputs).argmax(1) for t in (0, 2))
    lost = {int(i) for i in torch.nonzero((before == labels) & (after != labels))}
    shown = found.images.forgotten["0"]
    assert 0 < len(shown) <= 8
    for sample in shown:
        number = int(sample.id.split(".")[1]) - 1
        assert number in lost
        assert sample.label == int(labels[number])
        assert sample.guess == int(after[number])
        url = found.images.pictures[sample.id]
        picture = Image.open(io.BytesIO(base64.b64decode(url.split(",")[1])))
        low, high = inputs.min(), inputs.max()
        wanted = (inputs[number, 0] - low) / (high - low) * 255
        np.testing.assert_allclose(np.array(picture), wanted.round(), atol=1)


def test_an_analysis_is_kept_until_the_trace_changes(digits_run, tmp_path):
    shutil.copytree(digits_run("rotated-digits", "sgd").path, tmp_path / "run")
    trace = load_trace(tmp_path / "run")
    assert known_analysis(trace) is None
    made = cached_analysis(trace, samples=SAMPLES)
    assert known_analysis(trace) == made
    file = tmp_path / "run" / "analysis.json"
    assert cached_analysis(trace, samples=SAMPLES) == made
    assert cached_analysis(trace, samples=SAMPLES + 1).samples == SAMPLES + 1  # another question
    record = json.loads((tmp_path / "run" / "trace.json").read_text())
    record["seconds"] = 1.0
    (tmp_path / "run" / "trace.json").write_text(json.dumps(record))
    assert known_analysis(trace) is None
    file.write_text("{")
    assert known_analysis(trace) is None


def test_what_is_missing_is_said(digits_run, tmp_path):
    whole = digits_run("rotated-digits", "sgd")
    shutil.copy(whole.path / "trace.json", tmp_path)
    with pytest.raises(TraceError, match="the trace has no seed-0/task-01"):
        analyse(load_trace(tmp_path))
    unlearned = load_trace(whole.path)
    unlearned.accuracy = np.full_like(unlearned.accuracy, np.nan)
    with pytest.raises(TraceError, match="has not learned any task"):
        analyse(unlearned)
    with pytest.raises(ValueError, match="samples must be a whole number of at least 2"):
        analyse(whole, samples=1)
