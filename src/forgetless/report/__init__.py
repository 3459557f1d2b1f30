"""What people look at: tables and pictures, made from traces alone."""

from forgetless.report.plots import plot_accuracy
from forgetless.report.tables import comparison_table, task_table

__all__ = ["comparison_table", "plot_accuracy", "task_table"]
