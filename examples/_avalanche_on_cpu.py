"""Lets Avalanche be imported where torch has no CUDA: import this first.

Avalanche imports torchvision, whose wheels on the package index are built with CUDA. On a CPU-only
torch their compiled operators do not load, and then torchvision fails to import, because it
describes two of them to torch's compiler. Avalanche needs none of them, so it is enough to declare
those two. Where torchvision works, nothing is declared.

Lightning and transformers import torchvision wherever it is installed. So that they need not this
module too, `make` installs Avalanche and torchvision into a folder of their own.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(sys.prefix) / "avalanche"))  # where `make` puts them

_declared = torch.library.Library("torchvision", "FRAGMENT")  # holds as long as this name does

try:
    import torchvision  # noqa: F401
except ModuleNotFoundError:
    pass  # nor is Avalanche here, and importing it will say so
except RuntimeError:
    for name in ("nms", "qnms"):
        _declared.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
