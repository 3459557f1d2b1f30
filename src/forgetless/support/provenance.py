"""The package's version, and what a run ran on: versions, machine, a fingerprint of the code."""

import hashlib
import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `forgetless --version` must not wait for torch
    import torch

__version__ = "0.1.0"


def versions(device: "torch.device") -> dict[str, str]:
    """Versions of forgetless, Python, torch and NumPy, and the device."""
    import numpy as np
    import torch

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
    """The first 12 digits of a SHA-256 over the package's source files."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]
