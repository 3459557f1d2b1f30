"""States as trees: any of them comes back, and what could not come back is rejected."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgetless import SGD, ConfigError, Guard, Method, Training, fit
from forgetless.linalg import Growth, Layout
from forgetless.methods import Samples
from forgetless.methods.ogd import empty_subspace
from forgetless.methods.state import (
    STRUCTURE,
    check_state,
    grown_state,
    restored_state,
    state_bytes,
    state_tensors,
    take_step,
)
from forgetless.subspace import DENSE, FACTORED
from tests.conftest import blobs

SEEDS = 3
THETA = torch.zeros(SEEDS, 5, dtype=torch.float64)


@dataclass(frozen=True)
class Pair:
    first: Any
    second: Any


@dataclass(frozen=True)
class Keeps(Method[Any]):
    """A method whose three functions are given, for states of all kinds."""

    name = "keeps"
    acts_on = "gradient"
    initial: Any = None
    changed: Any = None

    def init(self, view):
        return self.initial

    def update(self, g, state, view):
        return (g, state) if self.changed is None else self.changed(g, state)

    def consolidate(self, state, view, task):
        return state


def some_samples(count: int) -> Samples:
    inputs = torch.arange(float(SEEDS * count * 2)).view(SEEDS, count, 2)
    labels = torch.arange(SEEDS * count).view(SEEDS, count)
    samples = Samples(inputs, labels, torch.zeros_like(labels))
    return samples.attach(logits=inputs.square())


def again(state: Any, storage=DENSE, method=None) -> Any:
    of_seeds = [state_tensors(state, seed) for seed in range(SEEDS)]
    return restored_state(of_seeds, method or Keeps(), THETA, storage, Samples.restore)


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    elif isinstance(one, Pair):
        assert_equal((one.first, one.second), (other.first, other.second))
    elif isinstance(one, Samples):
        for seed in range(SEEDS):
            assert_equal(one.tensors(seed), other.tensors(seed))
    else:
        assert one == other


kinds = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
tensors = st.builds(
    lambda shape, kind: torch.ones(SEEDS, *shape).cumsum(0).to(kind),
    st.lists(st.integers(0, 3), max_size=2),
    kinds,
)
names = st.text("abä. ", max_size=4) | st.integers(-5, 5)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | tensors
    | st.builds(some_samples, st.integers(0, 3))
)
trees = st.recursive(
    leaves,
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.tuples(parts, parts)
        | st.dictionaries(names, parts, max_size=3)
        | st.builds(Pair, parts, parts)
    ),
    max_leaves=8,
)


@given(trees)
def test_any_tree_comes_back(state):
    assert_equal(again(state), state)


def test_keys_that_are_written_alike_are_rejected():
    with pytest.raises(ConfigError, match="the keys of a dict in a state must be"):
        state_tensors({1: 2, "1": 3}, 0)


@pytest.mark.parametrize("storage", [DENSE, FACTORED])
def test_subspaces_come_back_within_a_tree(storage):
    state = {"directions": empty_subspace(THETA, storage), "count": 2}
    found = again(state, storage)
    assert type(found["directions"]) is type(state["directions"])
    assert found["count"] == 2


def test_what_a_state_takes_is_what_its_tensors_take():
    assert state_bytes({"a": torch.zeros(SEEDS, 4), "b": 7, "c": None}) == 16


def test_a_class_that_the_method_does_not_know_is_rejected():
    of_seeds = [state_tensors(Pair(1, 2), seed) for seed in range(SEEDS)]
    with pytest.raises(ConfigError, match="holds a Pair, which SGD does not know: define the cl"):
        restored_state(of_seeds, SGD(), THETA, DENSE, Samples.restore)


def test_a_damaged_structure_is_an_error_that_readers_expect():
    tensors = state_tensors({"a": torch.zeros(SEEDS, 2)}, 0)
    for text in (b"{", b"[]", b'{"kind": "pickle"}', b'{"kind": "dict"}'):
        broken = {**tensors, STRUCTURE: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        with pytest.raises((LookupError, TypeError, ValueError)):
            restored_state([broken] * SEEDS, Keeps(), THETA, DENSE, Samples.restore)


TASKS = blobs(tasks=2, n=8)
TRAINING = Training(lr=0.1, epochs=1, batch_size=4)


def in_fit(method):
    fit(TASKS, method, seeds=2, training=TRAINING)


def in_a_guard(method):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, method)
    train = TASKS.task(0, [0]).train
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(train.inputs), train.labels).backward()
        optimizer.step()
    guard.end_task((train.inputs, train.labels))


def changed_in_place(g, state):
    state["sum"].add_(1)
    return g, state


def grown_in_place(g, state):
    state["seen"].append(1)
    return g, state


DRIVERS = pytest.mark.parametrize("driver", [in_fit, in_a_guard])


@DRIVERS
@pytest.mark.parametrize(
    ("initial", "changed", "message"),
    [
        (lambda s: {"sum": torch.zeros(s, 1)}, changed_in_place, "changed its state in place"),
        (lambda s: {"seen": []}, grown_in_place, "changed its state in place"),
        (lambda s: None, lambda g, _: g, r"must return the step and the state, not a tensor"),
        (lambda s: None, lambda g, _: None, r"must return the step and the state, not None"),
        (
            lambda s: None,
            lambda g, _: (g[0], None),
            r"a step of shape \(1, .*not a tensor",
        ),
        (lambda s: None, lambda g, _: (g, {1, 2}), "must be a tensor, samples, .* not a set"),
        (lambda s: None, lambda g, _: (g, torch.zeros(())), "a leading dimension of"),
        (lambda s: torch.zeros(7, 2), lambda g, state: (g, state), "a leading dimension of"),
    ],
)
def test_mistakes_of_a_method_are_one_clear_error(driver, initial, changed, message):
    class Own(Keeps):
        def init(self, view):
            return initial(len(view.theta))

    with pytest.raises(ConfigError, match=message):
        driver(Own(changed=changed))


@DRIVERS
def test_a_consolidate_without_return_is_one_clear_error(driver):
    class Forgetful(Keeps):
        def consolidate(self, state, view, task):
            pass

    with pytest.raises(ConfigError, match="consolidate returned None: it must return the next"):
        driver(Forgetful(initial={"count": 1}))


def test_a_method_must_say_what_it_acts_on():
    class Silent(Method):
        name = "silent"

        def init(self, view): ...

        def update(self, g, state, view): ...

        def consolidate(self, state, view, task): ...

    with pytest.raises(ConfigError, match="Silent must say what it acts on: acts_on = 'gradient'"):
        Silent()


@pytest.mark.parametrize("acts_on", ["gradients", "", None, 1])
def test_what_a_method_acts_on_is_one_of_two(acts_on):
    wanted = f"must be 'gradient' or 'update', not {acts_on!r}"
    declared = type("Declared", (Keeps,), {"acts_on": acts_on})
    computed = type("Computed", (Keeps,), {"acts_on": property(lambda self: acts_on)})
    for kind in (declared, computed, lambda: Hoards(acts_on)):
        with pytest.raises(ConfigError, match=wanted):
            kind()


def test_a_state_that_holds_itself_is_rejected():
    shared = [1.0]
    check_state(Keeps(), {"a": shared, "b": shared}, SEEDS)  # twice, not in itself
    shared.append({"again": shared})
    with pytest.raises(ConfigError, match=r"a state cannot hold itself, as it does at a\.1\.again"):
        check_state(Keeps(), {"a": shared}, SEEDS)


@pytest.mark.parametrize("acts_on", ["gradient", "update"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_with_a_graph_is_the_step_without(acts_on, optimizer):
    def ends(scale):
        method = type("Scaled", (Keeps,), {"acts_on": acts_on})(
            initial=0.0, changed=lambda g, state: (g * scale, state)
        )
        training = Training(lr=0.1, epochs=1, batch_size=8, optimizer=optimizer)
        found = fit(blobs(), method, seeds=1, training=training).weights(seed=0, task=1)
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 3)
        steps = torch.optim.AdamW(model.parameters(), lr=0.1)
        with Guard(model, steps, method):
            model(torch.ones(4, 6)).square().sum().backward()
            steps.step()
        return [*found.values(), *model.state_dict().values()]

    plain, graph = ends(torch.tensor(0.5)), ends(torch.tensor(0.5, requires_grad=True))
    assert not any(weights.requires_grad for weights in graph)
    assert all(map(torch.equal, plain, graph))


def test_a_method_that_says_that_it_is_recordable_must_keep_its_state():
    class Fast(Keeps):
        recordable = True

    g = torch.zeros(1, 2)
    assert take_step(Fast(), g, "state", None) == (g, "state")
    with pytest.raises(ConfigError, match="since it says recordable = True"):
        take_step(Fast(changed=lambda g, _: (g, "another")), g, "state", None)


@dataclass(frozen=True)
class Hoards(Method[Any]):
    """Stores what it was lent, and copies of it, which must stay the same."""

    name = "hoards"
    reaches_heads = True
    acts_on: str = "gradient"

    def init(self, view):
        return (view.theta, view.theta.clone())

    def update(self, g, state, view):
        for lent, copy in zip(state[::2], state[1::2], strict=True):
            assert torch.equal(lent, copy)
        theta = view.theta
        return g, (theta, theta.clone(), g, g.clone())

    def consolidate(self, state, view, task):
        return (view.theta, view.theta.clone(), *state)


@pytest.mark.parametrize("acts_on", ["gradient", "update"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_what_a_method_stores_does_not_follow_the_weights(acts_on, optimizer):
    training = Training(lr=0.1, epochs=2, batch_size=8, optimizer=optimizer)
    fit(blobs(), Hoards(acts_on), seeds=2, training=training)
    model = torch.nn.Linear(6, 3)
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    steps = kind(model.parameters(), lr=0.1, weight_decay=0.1)
    guard = Guard(model, steps, Hoards(acts_on))
    samples = torch.randn(8, 6), torch.arange(8) % 3
    for _ in range(2):
        for _ in range(3):
            steps.zero_grad(set_to_none=False)
            torch.nn.functional.cross_entropy(model(samples[0]), samples[1]).backward()
            steps.step()
        guard.end_task(samples)


GROWTH = Growth(Layout({"w": (5,)}), Layout({"w": (7,)}))


@dataclass(frozen=True)
class Grows(Keeps):
    zero_for_new_weights = True


def test_a_state_for_a_network_that_has_grown():
    """Numbers per weight get zeros, directions do what they can, and the rest stays."""
    rows, theta = torch.randn(SEEDS, 2, 5).double(), torch.zeros(SEEDS, 7).double()
    samples, other = Samples(rows, rows[..., 0].long(), None), torch.randn(SEEDS, 4)
    counts = torch.zeros(SEEDS, 5, dtype=torch.long)  # no weights: they are real
    state = Pair(rows, {"a": (samples, other, counts), "b": empty_subspace(THETA, DENSE)})
    grown = grown_state(Grows(), state, GROWTH, theta)
    assert torch.equal(grown.first[..., :5], rows)
    assert not grown.first[..., 5:].any()
    assert grown.second["a"] == (samples, other, counts)
    assert grown.second["b"].rows.shape == (SEEDS, 0, 7)
    with pytest.raises(ConfigError, match=r"Keeps stores numbers per weight.*zero_for_new_weights"):
        grown_state(Keeps(), state, GROWTH, theta)
    assert grown_state(Keeps(), (samples, other), GROWTH, theta) == (samples, other)
