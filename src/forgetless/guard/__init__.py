"""A guard for anyone's training loop."""

from forgetless.guard.drift import Drift, TaskDrift
from forgetless.guard.estimate import Estimate
from forgetless.guard.guard import Guard
from forgetless.guard.report import MemoryReport, Stats, TaskMemory

__all__ = ["Drift", "Estimate", "Guard", "MemoryReport", "Stats", "TaskDrift", "TaskMemory"]
