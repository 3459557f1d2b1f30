"""The search of EWC's strength."""

from forgetless.paper.artefacts import (
    protocols,
)
from forgetless.paper.benchmarks import SMALL


def test_a_search_of_which_all_diverged_is_over():
    """Then there is no strength to choose, and nothing is searched again."""
    search = {"rotated corrected": dict.fromkeys(map("{:g}".format, SMALL.strengths))}
    results = {"ewc-strength": {"data": search}}
    cells = protocols.protocol_cells(SMALL, results)
    assert cells["rotated/corrected/ewc"] is None
    assert cells["rotated/released/ewc"] is not None
