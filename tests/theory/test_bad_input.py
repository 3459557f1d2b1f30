"""Every mistake is one ConfigError that names the argument."""

import pytest
import torch

from forgetless.support.validation import ConfigError
from forgetless.tangent import tangent_features
from forgetless.theory import (
    ComponentProjection,
    Descent,
    GradientProjection,
    LinearTask,
    NoProjection,
    SampleProjection,
    bounds,
    coordinates,
    decompose,
    drift,
    explained_at,
    explained_variance,
    factors,
    gram_grid,
    kernel_change,
    learn,
    model_drift,
    overlap,
    principal_angles,
    true_class,
)
from tests.theory.problems import random_tasks

TASKS = random_tasks(0, (4, 3, 4), 6)
LEARNED = learn(TASKS, NoProjection())
ONES, EYE = torch.ones(2), torch.eye(2)
NAN = torch.tensor([[1.0, float("nan")]])
MODEL = torch.nn.Linear(2, 2)
STATE = MODEL.state_dict()
PHI = tangent_features(MODEL, EYE, torch.tensor([0, 1]))
KEPT = [torch.tensor([0, 1])]

MISTAKES = {
    "no samples": (lambda: LinearTask(torch.ones(0, 3), torch.ones(0), torch.ones(0)), "features"),
    "no parameters": (lambda: LinearTask(torch.ones(2, 0), ONES, ONES), "features"),
    "a vector": (lambda: LinearTask(ONES, ONES, ONES), "features"),
    "NaN features": (lambda: LinearTask(NAN, torch.ones(1), torch.ones(1)), "features.*NaN"),
    "NaN targets": (lambda: LinearTask(EYE, NAN[0], ONES), "targets.*NaN"),
    "targets too long": (lambda: LinearTask(EYE, torch.ones(3), ONES), r"targets.*\(2,\)"),
    "column of outputs": (lambda: LinearTask(EYE, ONES, torch.ones(2, 1)), r"outputs.*\(2,\)"),
    "no tasks": (lambda: learn([], NoProjection()), "tasks"),
    "different p": (
        lambda: learn([*TASKS, *random_tasks(0, (2,), 5)], NoProjection()),
        "tasks.*p = ",
    ),
    "negative λ": (lambda: learn(TASKS, NoProjection(), weight_decay=-0.1), "weight_decay.*-0.1"),
    "NaN λ": (lambda: learn(TASKS, NoProjection(), weight_decay=float("nan")), "weight_decay.*nan"),
    "rtol 0": (lambda: learn(TASKS, NoProjection(), rtol=0.0), "rtol"),
    "d of 0": (lambda: ComponentProjection(components=0), "components.*at least 1"),
    "half a d": (lambda: ComponentProjection(components=2.5), "components.*whole number"),
    "half a memory": (lambda: SampleProjection(memory=2.5), "memory.*whole number.*2.5"),
    "a memory in words": (lambda: GradientProjection(memory="3"), "memory.*whole number"),
    "half a step": (lambda: Descent(max_steps=2.5), "max_steps.*whole number"),
    "operators for a kernel": (lambda: explained_variance(PHI), r"gram.*gram\(\).*TangentFeatures"),
    "a list of features": (lambda: factors([[1.0]]), "features.*'list'"),
    "angles of tensors": (lambda: principal_angles(EYE, EYE), "source.*`factors`.*'Tensor'"),
    "overlap of tensors": (lambda: overlap(factors(EYE), EYE), "target.*`factors`.*'Tensor'"),
    "d too large": (
        lambda: learn(TASKS, ComponentProjection(4)),
        "components.*3 samples of task 1",
    ),
    "memory of 0": (lambda: SampleProjection(memory=0), "memory.*at least 1"),
    "memory too large": (lambda: learn(TASKS, SampleProjection(4)), "memory.*3 samples of task 1"),
    "GEM-NT's too": (lambda: learn(TASKS, GradientProjection(4)), "memory.*3 samples of task 1"),
    "memory of True": (lambda: GradientProjection(memory=True), "memory"),
    "one tensor": (lambda: SampleProjection(memory=torch.tensor([1])), "memory"),
    "negative seed": (lambda: SampleProjection(2, seed=-1), "seed"),
    "index too large": (
        lambda: learn(TASKS, SampleProjection([torch.tensor([4])])),
        r"memory\[0\].*0 to 3",
    ),
    "negative index": (
        lambda: learn(TASKS, SampleProjection([torch.tensor([-1])])),
        r"memory\[0\]",
    ),
    "no index": (lambda: learn(TASKS, SampleProjection([torch.tensor([]).long()])), r"memory\[0\]"),
    "a mask": (lambda: learn(TASKS, SampleProjection([torch.ones(4).bool()])), r"memory\[0\]"),
    "a task without": (lambda: learn(TASKS, SampleProjection(KEPT)), "memory.*one for each task"),
    "share 1": (lambda: Descent(share=1.0), "share"),
    "tolerance 0": (lambda: Descent(tolerance=0.0), "tolerance"),
    "no steps": (lambda: Descent(max_steps=0), "max_steps"),
    "source = target": (lambda: decompose(LEARNED, 1, 1), "source and target"),
    "source after": (lambda: LEARNED.drift(2, 1), "source and target"),
    "no such target": (lambda: bounds(LEARNED, 0, 3), "source and target"),
    "negative source": (lambda: LEARNED.overlap(-1, 1), "source and target"),
    "features of other p": (lambda: decompose(LEARNED, 0, 1, EYE), r"features.*\(n, 6\)"),
    "predict other p": (lambda: LEARNED.predict(EYE, ONES), r"features.*\(n, 6\)"),
    "predict outputs": (lambda: LEARNED.predict(TASKS[0].features, ONES), "outputs"),
    "NaN in factors": (lambda: factors(NAN), "features"),
    "overlap of other p": (lambda: overlap(factors(EYE), factors(torch.eye(3))), "target"),
    "basis of other p": (lambda: overlap(factors(EYE), factors(EYE), torch.eye(3)), "basis"),
    "no grams": (lambda: coordinates([]), "grams"),
    "not a grid": (lambda: coordinates([[EYE, EYE]]), "grams"),
    "block shape": (lambda: coordinates([[EYE, EYE], [EYE, torch.eye(3)]]), r"grams\[0\]\[1\]"),
    "asymmetric": (lambda: coordinates([[EYE, EYE], [2 * EYE, EYE]]), "symmetric"),
    "indefinite": (lambda: coordinates([[EYE, 3 * EYE], [3 * EYE, EYE]]), "semi-definite"),
    "NaN gram": (lambda: coordinates([[EYE * float("nan")]]), r"grams\[0\]\[0\]"),
    "no features": (lambda: gram_grid([]), "features"),
    "not square": (lambda: explained_variance(torch.ones(2, 3)), "gram.*square"),
    "no variance": (lambda: explained_variance(torch.ones(2, 2), centred=True), "gram"),
    "too many components": (lambda: explained_at(EYE, [1, 3]), "counts"),
    "kernels differ": (lambda: kernel_change(EYE, torch.eye(3)), "after"),
    "kernel of zero": (lambda: kernel_change(0 * EYE, EYE), "before"),
    "outputs differ": (lambda: drift(EYE, torch.eye(3)), "after"),
    "labels missing": (lambda: true_class(EYE), "y"),
    "label too large": (lambda: true_class(EYE, torch.tensor([0, 2])), "y.*0 to 1"),
    "labels as floats": (lambda: true_class(EYE, ONES), "y.*integers"),
    "NaN outputs": (lambda: true_class(NAN[0]), "outputs"),
    "state lacks": (lambda: model_drift(MODEL, STATE, {}, EYE, KEPT[0]), "after.*bias"),
    "no x": (lambda: model_drift(MODEL, STATE, STATE, EYE[:0]), "x"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name):
    mistake, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message) as caught:
        mistake()
    assert "\n" not in str(caught.value)
