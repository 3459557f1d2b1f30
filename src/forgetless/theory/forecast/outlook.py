"""What a forecast says: predicted outputs, accuracies and losses, and who is in danger."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from forgetless.support.errors import ConfigError

# Below this, pairs of tasks on which forecasts were checked often came out wrong.
TRUSTED = 0.5


@final
@dataclass(frozen=True)
class Outlook:
    """What is predicted for the source and the target under one way to train.

    Arguments:
        components: directions of the source that are protected, 0 for plain training; fewer than
            were asked for where the source has no more.
        outputs: predicted outputs on the source, (n, C).
        source_accuracy, target_accuracy: predicted, in percent; None if labels are not classes.
        source_loss, target_loss: predicted mean losses.
    """

    components: int
    outputs: Tensor
    source_accuracy: float | None
    target_accuracy: float | None
    source_loss: float
    target_loss: float

    def summary(self) -> dict[str, Any]:
        """The plain numbers, for JSON."""
        return {
            "components": self.components,
            "source_accuracy": self.source_accuracy,
            "source_loss": self.source_loss,
            "target_accuracy": self.target_accuracy,
            "target_loss": self.target_loss,
        }


@final
@dataclass(frozen=True)
class Forecast:
    """What training on the target will do to the source.

    Arguments:
        index: which of the given source samples were looked at, (n,); all, unless quick.
        labels: their labels, (n,).
        classes: the outputs that the source chooses among.
        now: the present state of the source and the target, in the form of an outlook.
        plain: the outlook for plain SGD.
        protected: the outlooks for PCA-OGD, one for each number of components asked for.
        overlap: singular values of the NTK overlap matrix between source and target, the cosines
            of the principal angles, decreasing.
        trust: 1 − ‖Δf − Jω‖ / ‖Δf‖ on the source, not below 0: how well the linearisation
            followed the first steps of real training. Below `TRUSTED`, do not rely on the forecast.
        steps: how many steps of training were forecast.
        seconds: what the forecast took.
    """

    index: Tensor
    labels: Tensor
    classes: range
    now: Outlook
    plain: Outlook
    protected: tuple[Outlook, ...]
    overlap: Tensor
    trust: float
    steps: int
    seconds: float

    @property
    def trusted(self) -> bool:
        """Whether the linearisation follows the network well enough to be relied on."""
        return self.trust >= TRUSTED

    @property
    def change(self) -> Tensor:
        """The predicted change of every source output, (n, C)."""
        return self.plain.outputs - self.now.outputs

    @property
    def accuracy_change(self) -> float | None:
        """The predicted change of the accuracy on the source, in points; None without classes."""
        if self.now.source_accuracy is None or self.plain.source_accuracy is None:
            return None
        return self.plain.source_accuracy - self.now.source_accuracy

    @property
    def angles(self) -> Tensor:
        """Principal angles between the tasks' tangent spaces in degrees, increasing."""
        return torch.rad2deg(torch.arccos(self.overlap.clamp(0, 1)))

    def endangered(self, count: int = 10) -> Tensor:
        """The source samples that are right now and predicted to be wrong, (≤ count,).

        Their places in the source as it was given, those with the most negative margin first:
        true-class output minus the largest other one.
        """
        now, then = (margins(o, self.labels, self.classes) for o in self._outputs())
        lost = torch.nonzero((now > 0) & (then < 0)).flatten()
        worst = lost[then[lost].argsort()][:count]
        return self.index.to(worst.device)[worst]

    def by_class(self) -> dict[int, tuple[float, float]]:
        """Present and predicted accuracy of each class of the source, in percent."""
        now, then = (margins(o, self.labels, self.classes) > 0 for o in self._outputs())
        shares = {}
        for label in self.labels.unique().tolist():
            of_class = self.labels == label
            before, after = (100 * right[of_class].double().mean().item() for right in (now, then))
            shares[int(label)] = (before, after)
        return shares

    def summary(self) -> dict[str, Any]:
        """The forecast as plain numbers, for JSON."""
        classified = self.now.source_accuracy is not None
        classes = self.by_class() if classified else {}
        return {
            "accuracy_change": self.accuracy_change,
            "now": self.now.summary(),
            "plain": self.plain.summary(),
            "protected": [o.summary() for o in self.protected],
            "by_class": {str(c): {"now": b, "predicted": a} for c, (b, a) in classes.items()},
            "endangered": self.endangered().tolist() if classified else [],
            "overlap": self.overlap.tolist(),
            "angles": self.angles.tolist(),
            "trust": self.trust,
            "trusted": self.trusted,
            "steps": self.steps,
            "seconds": self.seconds,
        }

    def _outputs(self) -> tuple[Tensor, Tensor]:
        return self.now.outputs, self.plain.outputs


def margins(outputs: Tensor, labels: Tensor, classes: range) -> Tensor:
    """True-class output minus the largest other one within the classes: (n, C), (n,) → (n,)."""
    if labels.is_floating_point():
        raise ConfigError("the source's labels are numbers, not classes: there are no margins")
    within = outputs[:, classes.start : classes.stop]
    own = (labels - classes.start).unsqueeze(1)
    others = within.scatter(1, own, -torch.inf)
    return within.gather(1, own).squeeze(1) - others.amax(1)
