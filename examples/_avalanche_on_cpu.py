"""Make Avalanche importable with a torch that has no CUDA: import this first.

Avalanche imports torchvision, whose published wheels are built with CUDA. On a CPU-only torch their
compiled operators do not load, and the import fails, because torchvision describes two of them to
torch's compiler. Avalanche needs neither, so declaring the two is enough. If torchvision works,
nothing is declared.

Lightning and transformers import torchvision wherever it is installed. `make` therefore installs
Avalanche and torchvision into a separate folder, so that they do not need this module.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(sys.prefix) / "avalanche"))  # where `make` installs them

_declared = torch.library.Library("torchvision", "FRAGMENT")  # valid as long as this name exists

try:
    import torchvision  # noqa: F401
except ModuleNotFoundError:
    pass  # Avalanche is missing too, and importing it says so
except RuntimeError:
    for name in ("nms", "qnms"):
        _declared.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
