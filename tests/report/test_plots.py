"""The figures for papers: what is drawn is what the traces say, and the files are vectors."""

import numpy as np
import pytest

from forgetless.launch.runs import resolve, run
from forgetless.report import plots
from forgetless.report.analysis import analyse
from forgetless.report.comparison import compare
from forgetless.support.validation import ConfigError
from forgetless.trace import Trace

SETTINGS = {"tasks": 3, "epochs": 1, "train_per_class": 8, "memory": 5, "samples": 30, "hidden": 12}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [
        run(resolve("rotated-digits", m, device="cpu", seeds="2", **SETTINGS), out=root / m)
        for m in ("sgd", "pca-ogd")
    ]


@pytest.fixture(scope="module")
def analyses(traces):
    return {trace.method: analyse(trace, samples=20) for trace in traces}


FROM_RUNS = ("accuracy_matrices", "accuracy_curves", "final_accuracy", "accuracy_against_memory")
FROM_ANALYSES = (
    "overlap_spectra", "overlap_maps", "explained_variance", "forecast_against_measured",
    "kernel_change",
)  # fmt: skip


@pytest.mark.parametrize("name", [*FROM_RUNS, *FROM_ANALYSES])
@pytest.mark.parametrize("width", [plots.COLUMN, plots.PAGE])
def test_every_figure_is_a_vector_of_the_asked_width(name, width, traces, analyses, tmp_path):
    what = traces if name in FROM_RUNS else analyses
    figure = getattr(plots, name)(what, width=width)
    content = plots.save(figure, tmp_path / "figure.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert f"/MediaBox [ 0 0 {width * 72:.6g}".encode() in content or (
        f"/MediaBox [ 0 0 {width * 72:g}".encode() in content
    )
    assert figure.get_figwidth() == width
    assert b"/Type3" not in content  # text that can be searched and edited


def test_the_matrices_show_the_means(traces):
    figure = plots.accuracy_matrices(traces)
    images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    for image, trace in zip(images, traces, strict=False):
        wanted = np.ma.masked_invalid(trace.accuracy.mean(0))
        np.testing.assert_allclose(image.filled(-1), wanted.filled(-1))


def test_the_matrices_stand_in_as_many_columns_as_asked(traces):
    for columns in (1, len(traces)):
        figure = plots.accuracy_matrices(traces, columns=columns)
        lefts = {round(axes.get_position().x0, 3) for axes in figure.axes if axes.images}
        assert len(lefts) == columns


def test_the_courses_and_finals_show_the_means(traces):
    sgd = traces[0].accuracy.mean(0)
    courses = plots.accuracy_curves(traces)
    for s in range(3):
        line = courses.axes[s].lines[0]
        np.testing.assert_array_equal(line.get_xdata(), np.arange(s, 3) + 1)
        np.testing.assert_allclose(line.get_ydata(), sgd[s:, s])
    final = plots.final_accuracy(traces).axes[0].lines[0]
    np.testing.assert_allclose(final.get_ydata(), sgd[2])


def test_memory_and_reasons_are_those_of_the_runs(traces, analyses):
    (comparison,) = compare(traces)
    lines = plots.accuracy_against_memory(comparison).axes[0].lines
    places = [float(line.get_xdata()[0]) for line in lines]
    assert places == [entry.memory_bytes for entry in comparison.entries]
    spectrum = plots.overlap_spectra(analyses, 1, 2).axes[0].lines[1]
    assert list(spectrum.get_ydata()) == analyses["pca-ogd"].overlap["1-2"]
    kernel = plots.kernel_change(analyses, 1).axes[0].lines[0]
    assert list(kernel.get_ydata()) == analyses["sgd"].kernel[1]
    drawn = plots.overlap_maps(analyses, statistic="mean").axes[0].images[0].get_array()
    assert drawn[2, 0] == pytest.approx(np.mean(analyses["sgd"].overlap["0-2"]))
    curve = plots.explained_variance(analyses, 2).axes[0].lines[0]
    np.testing.assert_allclose(curve.get_ydata(), 100 * np.array(analyses["sgd"].variance[2].curve))


@pytest.mark.parametrize("name", FROM_RUNS)
def test_one_run_is_a_list_of_one(name, traces):
    alone, listed = (getattr(plots, name)(runs) for runs in (traces[0], traces[:1]))
    assert [p.get_title("left") for p in alone.axes] == [p.get_title("left") for p in listed.axes]


def test_what_cannot_be_drawn_is_said(traces, analyses, tmp_path):
    other = Trace("other", "sgd", (0,), ("a",), np.full((1, 1, 1), np.nan))
    with pytest.raises(ConfigError, match="of one scenario"):
        plots.final_accuracy([*traces, other])
    with pytest.raises(ConfigError, match="must have learned a task"):
        plots.accuracy_curves([other])
    with pytest.raises(ConfigError, match="must have stored the methods' memory"):
        plots.accuracy_against_memory([other])
    with pytest.raises(ConfigError, match="target must be an analysed task, up to 2"):
        plots.overlap_spectra(analyses, 0, 5)
    with pytest.raises(ConfigError, match="largest or mean"):
        plots.overlap_maps(analyses, statistic="median")
    with pytest.raises(ConfigError, match="analyses must be a mapping from methods' names"):
        plots.kernel_change(analyses["sgd"])
    with pytest.raises(ConfigError, match="must not be empty"):
        plots.kernel_change({})
    with pytest.raises(ConfigError, match=r"must end in \.pdf"):
        plots.save(plots.final_accuracy(traces), tmp_path / "figure.doc")
