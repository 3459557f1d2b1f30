"""Engines: where runs are trained, one after another, in several processes or on a cluster."""

from forgetless.launch.engines.cluster import Cluster
from forgetless.launch.engines.jobs import Engine, Event, InProcess, Job, Order, Watch, train
from forgetless.launch.engines.processes import Processes
from forgetless.launch.engines.storage import (
    download,
    download_state,
    local_copy,
    publish,
    upload,
)

__all__ = [
    "Cluster",
    "Engine",
    "Event",
    "InProcess",
    "Job",
    "Order",
    "Processes",
    "Watch",
    "download",
    "download_state",
    "local_copy",
    "publish",
    "train",
    "upload",
]
