"""Engines: where runs are trained, one after another, in several processes or on a cluster."""

from forgetless.launch.engines.cluster import Cluster
from forgetless.launch.engines.inprocess import InProcess
from forgetless.launch.engines.job import Engine, Event, Job, Order, Outcome, Watch
from forgetless.launch.engines.processes import Processes
from forgetless.launch.engines.shared import brought_here, collect, pull, put_files, settle
from forgetless.launch.engines.storage import is_shared, shown
from forgetless.launch.engines.train import train

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
