"""The paper's evidence rebuilt: its tables, its figures, and a verdict on each of its claims."""

from forgetless.paper.artefacts import ARTEFACTS, chosen
from forgetless.paper.benchmarks import SCALES, scale_named
from forgetless.paper.build import Plan, Stage, build
from forgetless.paper.page import write_page

__all__ = [
    "ARTEFACTS",
    "SCALES",
    "Plan",
    "Stage",
    "build",
    "chosen",
    "scale_named",
    "write_page",
]
