"""The paper's numbers as typed in: they must agree with each other."""

import pytest

from forgetless.paper.benchmarks import FULL
from forgetless.paper.printed import FINAL, TABLE1, VARIANCE, VARIANCE_COUNTS


@pytest.mark.parametrize("benchmark", TABLE1)
def test_final_accuracies_average_to_the_printed_average(benchmark):
    for method, cell in TABLE1[benchmark].items():
        final, spread = FINAL[benchmark][method]
        assert len(final) == len(spread) == FULL.tasks(benchmark)
        assert sum(final) / len(final) == pytest.approx(cell.accuracy, abs=0.006)


def test_there_are_as_many_numbers_as_in_the_paper():
    assert sum(len(row[0]) for rows in FINAL.values() for row in rows.values()) == 275
    assert sum(len(rows) for rows in TABLE1.values()) == 20
    assert FULL.variance_counts == VARIANCE_COUNTS
    for column in VARIANCE.values():
        assert list(column) == sorted(column)
