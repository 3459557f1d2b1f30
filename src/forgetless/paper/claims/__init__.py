"""The claims of the paper, and how each is decided."""

from forgetless.paper.claims import (
    accuracy,
    memory,
    overlap,
    settings,
    structure,
    theory,
)
from forgetless.paper.claims.base import Claim

ALL: dict[str, list[Claim]] = {
    "The theory": theory.CLAIMS.all,
    "The overlap of tasks": overlap.CLAIMS.all,
    "Memory": memory.CLAIMS.all,
    "Structure in the data, and the kernel": structure.CLAIMS.all,
    "Accuracy on the benchmarks": accuracy.ACCURACY.all,
    "Forgetting on the benchmarks": accuracy.FORGETTING.all,
    "Settings and cost": settings.CLAIMS.all,
}
