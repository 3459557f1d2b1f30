"""The guard as a callback of Lightning: attached, remembered, saved."""

import copy
import csv
import inspect
import warnings
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from forgetless import AGEM, OGD, PCAOGD, ConfigError, Guard, tangent_features
from forgetless.guard.frameworks.base import GuardOptions
from forgetless.guard.frameworks.lightning import GuardCallback
from forgetless.support.validation import ForgetlessWarning
from tests.guard.frameworks.common import Looking, leak, network, points, vector

METHOD = PCAOGD(components=10, samples=48)
SETTINGS = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Classifier(lightning.LightningModule):
    def __init__(self, manual: bool = False, optimizers: int = 1) -> None:
        super().__init__()
        self.network = network()
        self.automatic_optimization = not manual
        self.optimizer_count = optimizers
        self.fails = False

    def forward(self, inputs):
        return self.network(inputs)

    def training_step(self, batch, batch_idx):
        if self.fails:
            raise RuntimeError("out of luck")
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self(inputs), labels)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self):
        made = [torch.optim.Adam(self.parameters(), lr=0.02) for _ in range(self.optimizer_count)]
        return made if len(made) > 1 else made[0]


def loader(shift: float) -> DataLoader:
    return DataLoader(TensorDataset(*points(shift)), batch_size=8)


def fit(module, shift, callback, ckpt_path=None, **settings) -> lightning.Trainer:
    trainer = lightning.Trainer(
        **{**SETTINGS, "max_epochs": 2, "callbacks": [callback], **settings}
    )
    trainer.fit(module, loader(shift), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(
    ("manual", "settings"),
    [
        (False, {}),
        (True, {}),
        (False, {"accumulate_grad_batches": 3}),
        (False, {"gradient_clip_val": 0.1}),
        (False, {"precision": "bf16-mixed"}),
    ],
    ids=["automatic", "manual", "accumulated", "clipped", "bf16"],
)
def test_no_step_touches_what_was_learned(manual, settings):
    module, callback = Classifier(manual), GuardCallback(METHOD)
    fit(module, 0, callback, **settings)
    guard = callback.guard
    directions = guard.state_dict()["memory.directions"]
    assert guard.tasks == 1
    assert len(directions) == 10
    before = vector(module, guard.names)
    fit(module, 2, callback, **settings)
    assert callback.guard is guard
    assert guard.tasks == 2
    assert leak(guard, before, vector(module, guard.names), directions) < 1e-5


def test_equals_a_loop_written_by_hand():
    module, callback = Classifier(), GuardCallback(METHOD)
    by_hand = copy.deepcopy(module.network)
    guard = None
    for shift in (0, 2):
        fit(module, shift, callback)
        optimizer = torch.optim.Adam(by_hand.parameters(), lr=0.02)
        if guard is None:
            guard = Guard(by_hand, optimizer, METHOD)
        guard.attach(optimizer)
        for _ in range(2):
            for inputs, labels in loader(shift):
                optimizer.zero_grad()
                nn.functional.cross_entropy(by_hand(inputs), labels).backward()
                optimizer.step()
        guard.end_task(loader(shift))
    for there, here in zip(module.network.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(there, here)


@pytest.mark.parametrize("method", [METHOD, AGEM(memory=20)], ids=lambda m: m.name)
def test_checkpoints_hold_what_is_remembered(tmp_path, method):
    module, callback = Classifier(), GuardCallback(method)
    fit(module, 0, callback).save_checkpoint(tmp_path / "one.ckpt")
    remembered = callback.guard.state_dict()
    before = vector(module, callback.guard.names)

    # Lightning counts the epochs of the checkpoint: two were made, one more is asked for.
    resumed, fresh = Classifier(), GuardCallback(method, end_task=False)
    fit(resumed, 2, fresh, ckpt_path=tmp_path / "one.ckpt", max_epochs=3)
    assert fresh.guard.tasks == 1
    loaded = fresh.guard.state_dict()
    assert loaded.keys() == remembered.keys()
    # A-GEM draws batches with the generators; the header counts steps.
    for name in loaded.keys() - {"generators", "header"}:
        torch.testing.assert_close(loaded[name], remembered[name], rtol=0, atol=0)
    if method is METHOD:
        assert leak(fresh.guard, before, vector(resumed, fresh.guard.names)) < 1e-5


@pytest.mark.parametrize("of", ["loader", "dataset", "batch"])
def test_what_a_pretrained_model_does_is_protected(of):
    protect = {"loader": loader(0), "dataset": loader(0).dataset, "batch": points(0)}[of]
    module, callback = Classifier(), GuardCallback(METHOD, protect=protect)
    by_hand = network()
    guard = Guard(by_hand, torch.optim.SGD(by_hand.parameters()), METHOD)
    guard.protect(points(0))
    directions, before = guard.state_dict()["memory.directions"], vector(by_hand, guard.names)
    fit(module, 2, callback)
    assert callback.guard.tasks == 2
    assert leak(guard, before, vector(module.network, guard.names), directions) < 1e-5
    fit(module, 2, callback)
    assert callback.guard.tasks == 3  # protected once


def test_the_last_task_is_saved_beside_the_checkpoints(tmp_path):
    module, callback = Classifier(), GuardCallback(METHOD)
    saving = ModelCheckpoint(tmp_path / "kept")
    settings = {"enable_checkpointing": True, "callbacks": [callback, saving]}
    fit(module, 0, callback, **settings)
    fresh = GuardCallback(METHOD)
    fresh.load(tmp_path / "kept")
    for name, tensor in callback.guard.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
    before = vector(module, callback.guard.names)
    directions = callback.guard.state_dict()["memory.directions"]
    fit(module, 2, fresh)
    assert fresh.guard.tasks == 2
    assert leak(fresh.guard, before, vector(module, fresh.guard.names), directions) < 1e-5


def test_a_checkpoint_without_what_is_stored_is_warned_of(tmp_path):
    module = Classifier()
    fit(module, 0, lightning.Callback()).save_checkpoint(tmp_path / "bare.ckpt")
    guarded, remembered = Classifier(), GuardCallback(METHOD)
    fit(guarded, 0, remembered).save_checkpoint(tmp_path / "whole.ckpt")
    remembered.save(tmp_path)

    def resume(name, callback) -> list[str]:
        with warnings.catch_warnings(record=True) as got:
            warnings.simplefilter("always")
            fit(Classifier(), 2, callback, ckpt_path=tmp_path / name, max_epochs=3)
        return [str(one.message) for one in got if issubclass(one.category, ForgetlessWarning)]

    (told,) = resume("bare.ckpt", GuardCallback(METHOD))
    assert "bare.ckpt: earlier tasks are not protected" in told
    assert not resume("whole.ckpt", GuardCallback(METHOD))
    loaded = GuardCallback(METHOD)
    loaded.load(tmp_path)
    assert not resume("bare.ckpt", loaded)
    assert loaded.guard.tasks == 2


def test_the_removed_share_is_logged_and_kept(tmp_path):
    module, callback = Classifier(), GuardCallback(METHOD)
    logger = CSVLogger(tmp_path)
    settings = {"logger": logger, "log_every_n_steps": 4}
    fit(module, 0, callback, **settings)
    assert callback.stats().steps == 0
    fit(module, 2, callback, **settings)
    stats = callback.stats()
    assert stats.steps == 12
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["guard_removed"]]
    assert [int(row["step"]) for row in rows] == [3, 7, 11]
    assert float(rows[-1]["guard_removed"]) == pytest.approx(stats.removed)
    assert float(rows[-1]["guard_blocked"]) == pytest.approx(stats.blocked)
    assert 0 < stats.removed < 1


def test_the_strength_of_the_default_method_is_logged_and_kept(tmp_path):
    module, callback = Classifier(), GuardCallback()
    logger = CSVLogger(tmp_path)
    for number in (0, 2):
        fit(module, number, callback, logger=logger, log_every_n_steps=4)
    assert callback.stats().method["strength"] >= 3
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["guard_strength"]]
    assert [int(row["step"]) for row in rows] == [3, 7, 11]
    assert float(rows[-1]["guard_strength"]) == callback.stats().method["strength"]


def test_another_module_of_the_same_shape_goes_on():
    callback = GuardCallback(METHOD)
    fit(Classifier(), 0, callback)
    other = Classifier()
    before = vector(other, callback.guard.names)
    directions = callback.guard.state_dict()["memory.directions"]
    fit(other, 2, callback)
    assert callback.guard.tasks == 2
    assert leak(callback.guard, before, vector(other, callback.guard.names), directions) < 1e-5


def test_a_failure_is_not_remembered():
    module, callback = Classifier(), GuardCallback(METHOD)
    module.fails = True
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(module, 0, callback)
    assert callback.guard.tasks == 0


def test_a_trial_run_is_not_remembered():
    callback = GuardCallback(METHOD)
    fit(Classifier(), 0, callback, fast_dev_run=True)
    assert callback.guard.tasks == 0


def test_the_user_may_end_tasks():
    callback = GuardCallback(OGD(samples=5), end_task=False)
    fit(Classifier(), 0, callback)
    assert callback.guard.tasks == 0
    callback.end_task(loader(0))
    assert callback.guard.memory_report().directions == 5


class Halves(Classifier):
    """Each layer has an optimizer of its own, of which each step trains one."""

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        optimizer = self.optimizers()[batch_idx % 2]
        self.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self(inputs), labels))
        optimizer.step()

    def configure_optimizers(self):
        layers = [layer for layer in self.network if [*layer.parameters()]]
        return [torch.optim.Adam(layer.parameters(), lr=0.02) for layer in (layers[0], layers[-1])]


def test_every_optimizer_is_guarded():
    module, callback = Halves(manual=True), GuardCallback(METHOD)
    fit(module, 0, callback)
    fit(module, 2, callback)
    stats = callback.stats()
    assert stats.steps == 12
    assert all(share > 0 for share in stats.layers.values())


def test_a_head_that_grows_between_two_trainings():
    module, callback = Classifier(), GuardCallback(METHOD)
    fit(module, 0, callback)
    guard, old = callback.guard, module.network[-1]
    module.network[-1] = nn.Linear(old.in_features, old.out_features + 2)
    with torch.no_grad():
        module.network[-1].weight[: old.out_features] = old.weight
        module.network[-1].bias[: old.out_features] = old.bias
    fit(module, 2, callback)
    assert callback.guard is guard
    assert guard.tasks == 2
    assert len(guard.state_dict()["memory.directions"].shape) == 2


def test_mistakes_are_found_before_training():
    with pytest.raises(TypeError, match="componets"):
        GuardCallback(METHOD, componets=3)
    with pytest.raises(ConfigError, match="no guard yet"):
        GuardCallback(METHOD).guard  # noqa: B018


def test_options_are_those_of_the_guard():
    parameters = inspect.signature(Guard.__init__).parameters.values()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert GuardOptions.__annotations__.keys() == keywords


class Standardising(Classifier):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return (batch[0] - 100) / 10, batch[1]


class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        inputs, labels = points(0.0)
        return DataLoader(TensorDataset(10 * inputs + 100, labels), batch_size=8)


class StandardisingData(Data):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return (batch[0] - 100) / 10, batch[1]


@pytest.mark.parametrize("of_data", [False, True], ids=["module", "data module"])
def test_what_is_remembered_has_gone_through_the_hooks(of_data):
    """The directions are those of the inputs that the network was trained on."""
    callback, made = GuardCallback(OGD(samples=48)), Classifier() if of_data else Standardising()
    given = StandardisingData() if of_data else Data().train_dataloader()
    settings = {**SETTINGS, "max_epochs": 1, "callbacks": [callback]}
    lightning.Trainer(**settings).fit(made, given)
    phi = tangent_features(made.network, *points(0.0)).dense()
    directions = callback.guard.state_dict()["memory.directions"]
    outside = phi - phi @ directions.T @ directions
    assert float(outside.norm() / phi.norm()) < 1e-4


@pytest.mark.parametrize("accumulated", [1, 3])
def test_methods_see_the_batches_of_every_step(accumulated):
    seen = []
    fit(Classifier(), 0, GuardCallback(Looking(seen)), accumulate_grad_batches=accumulated)
    assert [len(batch) for batch in seen] == [8 * accumulated] * (12 // accumulated)
    first = next(iter(loader(0)))
    assert torch.equal(seen[0].parts[0].args[0][:8], first[0])
    assert torch.equal(seen[0].parts[0].target[:8], first[1])
