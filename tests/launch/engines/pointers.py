"""Pointers of shared storage as a reader of files that the fuzzer knows."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from forgetless.launch.engines.storage import SAVED, Mirror, ObjectStore
from forgetless.trace.checkpoint import checksum
from tests.faults.readers import Reader, spoiled_json


def pointer_reader(folder: Path) -> Reader:
    """The one pointer of a job's copy; `spoil` sets its checksum right again."""
    job, here = folder / "shared", folder / "fetched"
    (folder / "job" / "checkpoint").mkdir(parents=True)
    (folder / "job" / "trace.json").write_text("{}")
    (folder / "job" / "checkpoint" / "manifest-000001.json").write_text("{}")
    storage = ObjectStore(f"file://{job}")
    Mirror(folder / "job", storage, storage).save()
    (file,) = (job / SAVED).glob("pointer-*")
    sound = file.read_bytes()

    def read(content: bytes) -> object:
        file.write_bytes(content)
        shutil.rmtree(here, ignore_errors=True)
        Mirror(here, storage, storage).fetch()
        return None

    def spoil(content: bytes, draw: random.Random) -> bytes:
        files: Any = spoiled_json(json.loads(content)["files"], draw)
        return json.dumps({"blake2b": checksum(files), "files": files}).encode()

    return Reader(read, sound, spoil)
