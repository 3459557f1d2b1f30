"""What a run ran on: versions, machine, and a fingerprint of the code itself."""

import hashlib
import platform
from functools import cache
from pathlib import Path

import numpy as np
import torch

from forgetless.support.version import __version__


def versions(device: torch.device) -> dict[str, str]:
    """Versions of the program and its foundations, and the device."""
    return {
        "forgetless": __version__,
        "code": code_fingerprint(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


@cache
def code_fingerprint() -> str:
    """SHA-256 over the package's source files, the first 12 digits."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]
