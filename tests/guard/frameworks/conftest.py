"""What has to be there before the tests of the integrations import anything."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

from forgetless.support.files import write_atomically


def _settle_avalanche() -> None:
    """Write Avalanche's settings, as it would when it is first imported, but whole at once.

    Several processes import it at the same time, and one would read what another has half written.
    """
    settings = Path("~/.avalanche/config.json").expanduser()
    is_installed = (Path(sys.prefix) / "avalanche").is_dir() or find_spec("avalanche") is not None
    if settings.exists() or not is_installed:
        return
    text = json.dumps({"dataset_location": str(settings.parent / "data")})
    write_atomically(settings, lambda file: file.write_text(text, "utf-8"))


_settle_avalanche()
