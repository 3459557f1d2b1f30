"""Engines: where runs are trained, one after another, in several processes or on a cluster."""

from forgetless.engines.cluster import Cluster
from forgetless.engines.inprocess import InProcess
from forgetless.engines.job import Engine, Event, Job, Order, Outcome, Watch
from forgetless.engines.processes import Processes
from forgetless.engines.shared import brought_here, collect, pull, put_files, settle
from forgetless.engines.storage import is_shared, shown
from forgetless.engines.train import train

__all__ = [
    "Cluster",
    "Engine",
    "Event",
    "InProcess",
    "Job",
    "Order",
    "Outcome",
    "Processes",
    "Watch",
    "brought_here",
    "collect",
    "is_shared",
    "pull",
    "put_files",
    "settle",
    "shown",
    "train",
]
