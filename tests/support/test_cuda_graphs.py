"""Work that is recorded once and repeated: when it is, when not, and that nothing changes by it."""

import gc
from contextlib import contextmanager

import pytest
import torch
from torch import nn, optim

from forgetless import OGD, PCAOGD, Guard
from forgetless.support import cuda_graphs as capture_graph
from forgetless.support.cuda_graphs import GraphedFunction
from tests.methods.test_own_methods import own

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Pretended:
    """A graph that does what a real one would: what was launched while it was recorded."""

    def __init__(self, done):
        self.done = done

    def replay(self):
        self.done.append("replay")


@pytest.fixture
def done(monkeypatch):
    """What was done, in order, where graphs are pretended."""
    happened = []

    @contextmanager
    def recording(graph, device):
        happened.append("record")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Pretended(happened))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: recording_nothing())
    monkeypatch.setattr(capture_graph, "capture_graph", recording)
    return happened


@contextmanager
def recording_nothing():
    yield


GPU = torch.device("cuda", 0)


def test_work_is_done_twice_then_recorded_then_repeated(done):
    repeated = GraphedFunction(lambda: done.append("work"))
    for _ in range(4):
        repeated("here", GPU)
    assert done == ["work", "work", "record", "work", "replay", "replay"]
    done.clear()
    repeated("there", GPU)  # a tensor has moved: the recording is of no use any more
    assert done == ["work"]
    repeated("there", GPU)
    repeated("there", GPU)
    assert done == ["work", "work", "record", "work", "replay"]


def test_on_a_cpu_nothing_is_recorded(done):
    repeated = GraphedFunction(lambda: done.append("work"))
    for _ in range(4):
        repeated("here", torch.device("cpu"))
    assert done == ["work"] * 4


def test_work_that_cannot_be_recorded_is_done_from_python(done):
    def work():
        if done.count("record") > done.count("failed"):
            done.append("failed")
            raise RuntimeError("operation not permitted when stream is capture_graph")
        done.append("work")

    repeated = GraphedFunction(work)
    for _ in range(4):
        repeated("here", GPU)
    assert done == ["work", "work", "record", "failed", "work", "work"]


def test_within_a_users_own_recording_work_is_part_of_it(done, monkeypatch):
    repeated = GraphedFunction(lambda: done.append("work"))
    for _ in range(2):
        repeated("here", GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    done.clear()
    repeated("here", GPU)
    assert done == ["work"]
    other = GraphedFunction(lambda: done.append("work"))
    for _ in range(4):
        other("here", GPU)
    assert done == ["work"] * 5


def trained(method, steps, *, recorded, storage="dense", disturb=None):
    """A guarded model after some steps on a GPU, and what its guard noted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)).cuda()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, method, storage=storage)
    x = torch.randn(3, 64, 20, device="cuda")
    y = torch.randint(0, 5, (3, 64), device="cuda")
    for task in range(3):
        for number in range(steps):
            if not recorded:
                guard._steps._correct_all._is_recordable = False
                guard._steps._read_all._is_recordable = False
            if disturb is not None:
                disturb(model, number)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[task]), y[task]).backward()
            if disturb is not None and number == 3:
                model[0].bias.grad = None
            optimizer.step()
        used = guard._steps._correct_all._graph is not None
        if task < 2:
            guard.end_task((x[task], y[task]))
    return torch.cat([p.detach().flatten() for p in model.parameters()]), guard.stats(), used


def moved(model, number):
    """Parameters in other places than before."""
    if number == 4:
        for p in model.parameters():
            p.data = p.data.clone()


@needs_gpu
def test_rows_in_main_memory_are_not_recorded():
    plain, stats, _ = trained(OGD(20), 8, recorded=False, storage="dense")
    found, noted, used = trained(OGD(20), 8, recorded=True, storage="cpu")
    assert not used
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)
    assert noted.steps == stats.steps


@needs_gpu
@pytest.mark.parametrize("disturb", [None, moved])
@pytest.mark.parametrize("storage", ["dense", "bfloat16", "factored"])
@pytest.mark.parametrize("method", [OGD(20), PCAOGD(10, 40), own.OWM()])
def test_a_guards_recorded_steps_are_those_from_python(method, storage, disturb):
    plain, stats, used = trained(method, 8, recorded=False, storage=storage, disturb=disturb)
    assert not used
    found, noted, used = trained(method, 8, recorded=True, storage=storage, disturb=disturb)
    assert used
    assert torch.equal(found, plain)
    assert noted == stats


class ByStep(own.OWM):
    """Projects less as steps go by, which a recording would repeat."""

    def update(self, g, state, view):
        step, state = super().update(g, state, view)
        return g + (step - g) / (1 + view.step), state


@needs_gpu
def test_what_changes_from_step_to_step_is_not_recorded():
    plain, stats, _ = trained(ByStep(), 8, recorded=False)
    found, noted, used = trained(ByStep(), 8, recorded=True)
    assert not used
    assert torch.equal(found, plain)
    assert noted == stats


@needs_gpu
def test_a_graph_that_is_garbage_does_not_break_a_recording():
    def recorded() -> torch.cuda.CUDAGraph:
        x, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
        with capture_graph.capture_graph(graph, x.device):
            for _ in range(100):
                x = [x + 1][0]  # a list each, of which one starts a collection
        return graph

    cycle = [recorded()]
    cycle.append(cycle)
    del cycle
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        assert recorded() is not None
    finally:
        gc.set_threshold(*before)
