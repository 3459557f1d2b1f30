"""The files and functions of forgetless that a command runs: python scripts/touched.py ARGS.

Imports and class bodies do not count. For example

    python scripts/touched.py compare rotated-digits --methods sgd,pca-ogd --tasks 2 --epochs 1
"""

import inspect
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import forgetless
from forgetless.cli import main

ROOT = Path(forgetless.__file__).parent


def count(arguments: list[str]) -> Counter[CodeType]:
    """How often each function of forgetless was called by a command."""
    calls = Counter[CodeType]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            calls[frame.f_code] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    with suppress(SystemExit):
        main(arguments)
    sys.setprofile(None)
    own = [code for code in list(calls) if ROOT in Path(code.co_filename).parents]
    return Counter({code: calls[code] for code in own})


if __name__ == "__main__":
    found = count(sys.argv[1:])
    files = Counter(Path(code.co_filename).relative_to(ROOT).as_posix() for code in found)
    for name, functions in sorted(files.items()):
        print(f"{functions:4d} {name}")
    print(f"{len(files)} files, {len(found)} functions")
