"""All artefacts, in the order of the page."""

from forgetless.paper.artefact import Artefact
from forgetless.paper.artefacts import (
    forgetting_gap,
    kernel_change,
    layers,
    memory_sweep,
    methods_summary,
    more_methods,
    overlap_later,
    overlap_next,
    per_task,
    protocols,
    same_bytes,
    strength,
    table1,
    theory_checks,
    toy,
    variance,
)
from forgetless.support.errors import ConfigError

_ALL = (
    table1.ARTEFACT,
    per_task.ARTEFACT,
    forgetting_gap.ARTEFACT,
    strength.ARTEFACT,
    protocols.ARTEFACT,
    layers.ARTEFACT,
    more_methods.ARTEFACT,
    more_methods.GEM,
    memory_sweep.ARTEFACT,
    overlap_next.ARTEFACT,
    overlap_later.ARTEFACT,
    variance.ARTEFACT,
    kernel_change.ARTEFACT,
    theory_checks.ARTEFACT,
    toy.ARTEFACT,
    methods_summary.ARTEFACT,
    same_bytes.ARTEFACT,
)
ARTEFACTS: dict[str, Artefact] = {artefact.name: artefact for artefact in _ALL}


def chosen(names: list[str]) -> list[Artefact]:
    """The artefacts of those names with what they need before them; "all" means all."""
    found: dict[str, Artefact] = {}

    def add(name: str) -> None:
        if name not in ARTEFACTS:
            raise ConfigError(f"unknown artefact {name!r}; there are all, {', '.join(ARTEFACTS)}")
        for needed in ARTEFACTS[name].needs:
            add(needed)
        found[name] = ARTEFACTS[name]

    for name in ARTEFACTS if "all" in names else names:
        add(name)
    return list(found.values())
