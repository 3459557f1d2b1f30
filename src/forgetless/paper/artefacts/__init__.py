"""All artefacts, in the order of the page."""

from forgetless.paper.artefacts import (
    alignment,
    forgetting_gap,
    kernel_change,
    memory,
    methods_summary,
    overlap,
    per_task,
    protocols,
    same_bytes,
    table1,
    theory,
    toy,
    variance,
)
from forgetless.paper.workshop import Artefact
from forgetless.support.validation import ConfigError, unknown

_ALL = (
    table1.TABLE1,
    per_task.PER_TASK,
    forgetting_gap.FORGETTING_GAP,
    forgetting_gap.FORGETTING_CLOSER,
    protocols.STRENGTH,
    protocols.PROTOCOLS,
    protocols.LAYERS,
    table1.MORE_METHODS,
    table1.GEM,
    memory.MEMORY,
    overlap.NEXT,
    overlap.LATER,
    alignment.ALIGNMENT,
    variance.VARIANCE,
    kernel_change.KERNEL_CHANGE,
    theory.THEORY,
    toy.TOY,
    toy.TOY_MEAN,
    methods_summary.METHODS_SUMMARY,
    same_bytes.SAME_BYTES,
)
ARTEFACTS: dict[str, Artefact] = {artefact.name: artefact for artefact in _ALL}


def chosen(names: list[str]) -> list[Artefact]:
    """The artefacts of those names, after the artefacts that they need; "all" means all."""
    found: dict[str, Artefact] = {}

    def add(name: str) -> None:
        if name not in ARTEFACTS:
            raise ConfigError(unknown("artefact", name, ["all", *ARTEFACTS]))
        for needed in ARTEFACTS[name].needs:
            add(needed)
        found[name] = ARTEFACTS[name]

    for name in ARTEFACTS if "all" in names else names:
        add(name)
    return list(found.values())
