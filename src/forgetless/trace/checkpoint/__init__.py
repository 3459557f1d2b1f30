"""What a run needs to go on after it was stopped: written whole, checked when it is read."""

from forgetless.trace.checkpoint.lock import LOCK, FolderLock, is_locked
from forgetless.trace.checkpoint.store import CHECKPOINTS, Checkpoint, Store, checksum, digest

__all__ = [
    "CHECKPOINTS",
    "LOCK",
    "Checkpoint",
    "FolderLock",
    "Store",
    "checksum",
    "digest",
    "is_locked",
]
