"""Tables of runs, for the terminal and for papers, made from traces alone."""

from forgetless.report.ranking import Ranking, ranking
from forgetless.report.tables import (
    as_csv,
    as_frame,
    as_latex,
    comparison_table,
    rows,
    rows_of_seeds,
    task_table,
)

__all__ = [
    "Ranking",
    "as_csv",
    "as_frame",
    "as_latex",
    "comparison_table",
    "ranking",
    "rows",
    "rows_of_seeds",
    "task_table",
]
