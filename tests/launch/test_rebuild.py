"""Tasks and networks made again from a trace, or given where a script made them."""

import pytest
import torch
from torch import nn

import forgetless
from forgetless import PCAOGD, ConfigError, TraceError, Training, fit
from forgetless.launch.rebuild import load_from_script, rebuild
from forgetless.report.analysis import analyse
from forgetless.support.validation import ForgetlessWarning
from tests.conftest import blobs
from tests.conftest import forgetless as command

LINEAR = ("--linearised", "--components")

QUICK = Training(lr=0.05, epochs=1, batch_size=8)
SCRIPT = """
from torch import nn
from tests.conftest import blobs

def network():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

def make():
    return blobs(), network

def tasks():
    return blobs()

def other():
    return blobs(seed=1), network

def wrong():
    return 3

def needy(size):
    return blobs()
"""


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A run with tasks and a network of a script's own."""
    out = tmp_path_factory.mktemp("runs") / "own"
    method = PCAOGD(components=3, samples=12)
    return fit(blobs(), method, network, training=QUICK, out=out)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    return f"{tmp_path}/mine.py"


def test_readmes_own_example_is_analysed_and_forecast(tmp_path, capsys):
    """The lines of README with one epoch; nothing has to be given."""
    tasks = forgetless.scenario("rotated-digits", tasks=3)
    method, training = PCAOGD(components=50, samples=500), Training(lr=0.05, epochs=1)
    trace = fit(tasks, method, seeds=2, training=training, out=tmp_path / "run")
    found = analyse(trace, samples=20)
    assert (found.learned, found.projected, len(found.forecast)) == (3, True, 2)
    forecast = [
        "forecast",
        tmp_path / "run",
        "--linearised",
        "--components",
        "",
        "--quick",
        "--json",
    ]
    assert command(forecast, capsys)[0] == 0
    status, out, _ = command(["report", tmp_path / "run", "--analyse"], capsys)
    assert status == 0
    assert "could not be analysed" not in out


def test_own_tasks_and_networks_are_given(own):
    found = analyse(own, tasks=blobs(), model=network, samples=10)
    assert (found.learned, found.projected) == (2, True)
    made = rebuild(own, tasks=blobs(), model=network())
    for name, weight in made.network(own.weights(0, 1)).state_dict().items():
        assert torch.equal(weight, own.weights(0, 1)[name])
    assert made.training == QUICK


def test_what_is_not_given_is_asked_for(own):
    with pytest.raises(TraceError, match="own was trained with tasks and a model"):
        analyse(own)
    with pytest.raises(TraceError, match=r"a model \(tests.launch.test_rebuild:network\) of a .*"):
        rebuild(own, tasks=blobs())
    with pytest.raises(TraceError, match="trained with tasks of a script's own: give tasks=…, or"):
        rebuild(own, model=network)


def test_what_is_given_must_be_what_was_used(own):
    with pytest.raises(ConfigError, match=r"those of .*own: the data of task 1 differ"):
        rebuild(own, tasks=blobs(seed=1), model=network)
    with pytest.raises(ConfigError, match="learned 2 tasks, and tasks has 1"):
        rebuild(own, tasks=blobs(1), model=network)
    tanh = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(ConfigError, match=r"is not the one that .* its accuracy on task"):
        rebuild(own, tasks=blobs(), model=tanh)
    with pytest.raises(ConfigError, match="the weights do not fit the model of the run"):
        rebuild(own, tasks=blobs(), model=nn.Linear(6, 3))


def test_a_model_with_other_code_may_do_the_same(own):
    class Same(nn.Sequential):
        """Another class, the same function."""

    with pytest.warns(ForgetlessWarning, match="but with the run's weights it has the run's"):
        made = rebuild(own, tasks=blobs(), model=Same(*network()))
    assert isinstance(made.network(own.weights(0, 1)), Same)


def test_a_wrong_model_leaves_no_analysis_and_no_forecast(own, capsys, tmp_path):
    text = SCRIPT.replace("ReLU()", "Softsign()")
    (tmp_path / "wrong.py").write_text(text)
    given = ["--from", f"{tmp_path}/wrong.py:make"]
    status, out, err = command(["forecast", own.path, *LINEAR, "2", *given], capsys)
    assert (status, out) == (2, "")
    assert "is not the one that" in err
    page = ["report", own.path, "--analyse", "--out", tmp_path / "report.html"]
    stored = {file: file.read_bytes() for file in own.path.rglob("*") if file.is_file()}
    status, out, _ = command([*page, *given], capsys)
    assert status == 0
    assert "could not be analysed: the model given is not the one that" in " ".join(out.split())
    assert stored == {file: file.read_bytes() for file in own.path.rglob("*") if file.is_file()}


def test_the_command_takes_them_from_a_script(own, script, capsys, tmp_path):
    forecast = ["forecast", own.path, *LINEAR, "2", "--quick", "--json"]
    status, _, err = command(forecast, capsys)
    assert (status, err.count("\n")) == (2, 1)
    assert "--from SCRIPT.py:FUNCTION, that returns tasks and model" in err
    status, out, _ = command([*forecast, "--from", f"{script}:make"], capsys)
    assert status == 0
    assert '"scenario": "blobs"' in out
    page = ["report", own.path, "--analyse", "--out", tmp_path / "report.html"]
    assert "could not be analysed: " in command(page, capsys)[1]
    status, out, _ = command([*page, "--from", f"{script}:make"], capsys)
    assert status == 0
    assert "could not be analysed" not in out
    assert f"--from {script}:make" in (tmp_path / "report.html").read_text("utf-8")
    status, _, err = command([*forecast, "--from", f"{script}:make", "--target", "3"], capsys)
    assert status == 2
    assert "--target must be from 1 to 2, not 3" in err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", "must return tasks \\(a Scenario\\), a model, or both, not int"),
        ("needy", "cannot be called: TypeError: needy\\(\\) missing 1 required"),
        ("nothing", "has no nothing"),
    ],
)
def test_other_functions_are_refused(name, message, script):
    with pytest.raises(ConfigError, match=message):
        load_from_script(f"{script}:{name}")


def test_a_function_may_return_one_of_them(script):
    tasks, model = load_from_script(f"{script}:tasks")
    assert (tasks.n_tasks, model) == (2, None)
    assert isinstance(load_from_script(f"{script}:network")[1], nn.Module)
    assert isinstance(load_from_script("torch.nn:Identity")[1], nn.Identity)
