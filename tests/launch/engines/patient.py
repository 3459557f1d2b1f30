"""A method of a file that waits in the middle of a run until a test lets it go on."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from forgetless import OGD, View
from forgetless.methods import FinishedTask, option
from forgetless.methods.ogd import Orthogonal
from forgetless.subspace import Subspace

GATE = "FORGETLESS_TEST_GATE"  # names a file; while it is absent, the run waits
_WAIT_AFTER, _SECONDS = 3, 120.0


@dataclass(frozen=True)
class PatientOGD(Orthogonal):
    """OGD that stops at the end of its fourth task: a run that cannot be over too early."""

    name = "patient-ogd"
    samples: int = option(100, "As of OGD.", setting="memory")

    def consolidate(self, state: Subspace, view: View, task: FinishedTask) -> Subspace:
        """As OGD, once the gate is open."""
        gate, until = os.environ.get(GATE), time.monotonic() + _SECONDS
        while gate and view.task >= _WAIT_AFTER and not Path(gate).exists():
            assert time.monotonic() < until, "nobody opened the gate"
            time.sleep(0.01)
        return OGD(self.samples).consolidate(state, view, task)
