"""A guard for anyone's training loop."""

from forgetless.guard.guard import Guard
from forgetless.guard.report import MemoryReport, Stats, TaskMemory

__all__ = ["Guard", "MemoryReport", "Stats", "TaskMemory"]
