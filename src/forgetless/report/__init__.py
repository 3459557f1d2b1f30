"""Tables for the terminal, made from traces alone."""

from forgetless.report.comparison import comparison_table, task_table

__all__ = ["comparison_table", "task_table"]
