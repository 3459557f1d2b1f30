"""What the paper claims, and how each claim is decided."""

from forgetless.paper.claims import (
    benchmarks,
    forgetting,
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
    "Accuracy on the benchmarks": benchmarks.CLAIMS.all,
    "Forgetting on the benchmarks": forgetting.CLAIMS.all,
    "Settings and cost": settings.CLAIMS.all,
}
