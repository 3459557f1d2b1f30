"""A job's folder on this machine and its copy in shared storage, from which another goes on.

    saved/pointer-000007-1f2e3d4c.json         which files there are, where, and their checksums
    saved/1f2e3d4c-000012-part-000003-progress.safetensors    one of them, under a name of its own
    trace.json, and in the run's folder seed-N/…              when the job is over

Files are written under names that were never used, and the pointer to them last, so that it does
not matter when a machine dies, and no storage has to replace a file at once.
"""

import json
import re
import secrets
import shutil
import warnings
from pathlib import Path
from typing import Any, final

from forgetless.launch.engines.storage import ObjectStore
from forgetless.support.errors import ForgetlessWarning, TraceError, UnwritableError
from forgetless.trace.checkpoint import checksum, digest

SAVED = "saved"
_POINTER = re.compile(r"pointer-(\d{6,9})-[0-9a-f]{8}\.json")
_OBJECT = re.compile(r"[0-9a-f]{8}-\d{6,9}-[A-Za-z0-9.-]{1,80}")
_FILE = re.compile(
    r"trace\.json|checkpoint/(manifest|part)-\d{6,12}[a-z-]*\.(json|safetensors)"
    r"|seed-\d{1,9}/(task-\d{1,6}|memory)\.safetensors"
)
_MOST_POINTER_BYTES = 1 << 24
_KEPT = 2  # pointers that stay, so that no one damaged file takes them all
Described = dict[str, dict[str, Any]]  # file → its name in storage, bytes and checksum


@final
class Mirror:
    """A job's folder and its copy.

    Arguments:
        folder: of the job, on this machine.
        storage: of the job.
        run: storage of the run, where what is kept of the seeds goes.
    """

    def __init__(self, folder: Path, storage: ObjectStore, run: ObjectStore) -> None:
        self._folder = folder
        self._storage = storage
        self._run = run
        self._attempt = secrets.token_hex(4)
        self._count = 0
        self._sent: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}
        self._written: list[tuple[str, Described]] = []

    def fetch(self, *, only: str = "") -> None:
        """Bring here what was saved last and is whole; nothing if nothing was.

        Arguments:
            only: what names must begin with; by default all files come.
        """
        problem: TraceError | None = None
        for pointer in _pointers(self._storage.names()):
            try:
                files = self._read(pointer)
                for name in (n for n in files if n.startswith(only)):
                    self._get(name, files[name])
            except (TraceError, FileNotFoundError) as error:
                problem = TraceError(f"{self._storage.name}/{SAVED} is damaged: {error}")
                shutil.rmtree(self._folder, ignore_errors=True)
                continue
            if problem is not None:
                words = f"{problem}; the run goes on from what was saved before"
                warnings.warn(words, ForgetlessWarning, stacklevel=2)
            return
        if problem is not None:
            raise TraceError(
                f"{problem}, and nothing before it can be used; --overwrite starts anew"
            )

    def save(self) -> None:
        """Copy the folder as it is; where that cannot be done, the run goes on without."""
        try:
            self._save()
        except (UnwritableError, TraceError, FileNotFoundError) as error:
            words = f"a checkpoint was not copied, the next one will be: {error}"
            warnings.warn(words, ForgetlessWarning, stacklevel=2)

    def publish(self) -> None:
        """Copy what the finished job leaves: weights and memories first, its trace last."""
        own = {f.relative_to(self._folder).as_posix(): f for f in self._folder.glob("seed-*/*")}
        for name, file in own.items():
            self._run.put(file, name)
        seeds = {name.split("/")[0] for name in own}
        for name in self._run.names():
            if name.split("/")[0] in seeds and name not in own:
                self._run.remove(name)  # of a run that this one replaces
        self._storage.replace(self._folder / "trace.json", "trace.json")
        self._storage.remove_folder(SAVED)

    def _save(self) -> None:
        described: Described = {}
        for file in sorted(self._folder.rglob("*")):
            name = file.relative_to(self._folder).as_posix()
            if not file.is_file() or not _FILE.fullmatch(name):
                continue
            stat = file.stat()
            stamp = stat.st_size, stat.st_mtime_ns
            if self._sent.get(name, (None,))[0] != stamp:
                self._count += 1
                place = f"{self._attempt}-{self._count:06d}-{file.name}"
                self._storage.put(file, f"{SAVED}/{place}")
                of = {"object": place, "bytes": stat.st_size, "blake2b": digest(file)}
                self._sent[name] = stamp, of
            described[name] = self._sent[name][1]
        there = [n.removeprefix(f"{SAVED}/") for n in self._storage.names() if n.startswith(SAVED)]
        numbers = [int(m[1]) for m in map(_POINTER.fullmatch, there) if m]
        pointer = f"pointer-{1 + max(numbers, default=0):06d}-{self._attempt}.json"
        content = json.dumps({"blake2b": checksum(described), "files": described}).encode()
        self._storage.write(f"{SAVED}/{pointer}", content)
        self._written = [*self._written, (pointer, described)][-_KEPT:]
        needed = {name for name, _ in self._written}
        needed |= {of["object"] for _, files in self._written for of in files.values()}
        if len(self._written) == _KEPT:  # what other attempts have left stays until then
            for name in set(there) - needed:
                self._storage.remove(f"{SAVED}/{name}")

    def _read(self, pointer: str) -> Described:
        content = self._storage.read(f"{SAVED}/{pointer}", _MOST_POINTER_BYTES)
        try:
            record = json.loads(content)
            files: Described = record["files"]
            if record["blake2b"] != checksum(files):
                raise ValueError("its checksum is another")
            for name, of in files.items():
                if not (_FILE.fullmatch(name) and _OBJECT.fullmatch(of["object"])):
                    raise ValueError(f"{ascii(name)[:80]} is no file of a run")
                if not (type(of["bytes"]) is int and type(of["blake2b"]) is str):
                    raise ValueError(f"{ascii(name)[:80]} has no size and checksum")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
            raise TraceError(f"{pointer} cannot be used: {reason}") from error
        return files

    def _get(self, name: str, of: dict[str, Any]) -> None:
        place, file = f"{SAVED}/{of['object']}", self._folder / name
        if self._storage.size(place) != of["bytes"]:
            raise TraceError(f"{name} has another size")
        self._storage.get(place, file)
        if digest(file) != of["blake2b"]:
            raise TraceError(f"{name} has another checksum")


def _pointers(names: list[str]) -> list[str]:
    """The newest first."""
    found = [_POINTER.fullmatch(n.removeprefix(f"{SAVED}/")) for n in names if n.startswith(SAVED)]
    return [m[0] for m in sorted((m for m in found if m), key=lambda m: -int(m[1]))]
