"""Shared storage: folders anywhere fsspec reads and writes, and the copies of runs in them.

    saved/pointer-000007-1f2e3d4c.json       the files of one checkpoint and their checksums
    saved/1f2e3d4c-000012-part-000003-progress.safetensors     one of them, under a unique name
    trace.json, and in the run's folder seed-N/…               once the job is finished

Objects get names that were never used, and the pointer to them is written last: a machine may die
at any moment, and the storage need not replace files atomically. Nothing in it is trusted: all that
is read is JSON and safetensors, and checked.
"""

import json
import re
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any, Self, final

from forgetless.support.files import FolderLock, without_password, write_atomically
from forgetless.support.validation import (
    ConfigError,
    ForgetlessError,
    ForgetlessWarning,
    TraceError,
    UnwritableError,
    first_line,
)
from forgetless.trace import JOBS, TRACE_FILE, is_trace
from forgetless.trace.checkpoint import checksum, digest

SAVED = "saved"
_POINTER = re.compile(r"pointer-(\d{6,9})-[0-9a-f]{8}\.json")
_OBJECT = re.compile(r"[0-9a-f]{8}-\d{6,9}-[A-Za-z0-9.-]{1,80}")
_JOB = r"jobs/seeds-[0-9a-z-]{1,60}/"
_TRACE = re.compile(rf"({_JOB})?{re.escape(TRACE_FILE)}")
_SEED = re.compile(r"seed-\d{1,9}/(task-\d{1,6}|memory)\.safetensors")
_CHECKPOINT = re.compile(r"checkpoint/(manifest|part)-\d{6,12}[a-z-]*\.(json|safetensors)")
_MOST_POINTER_BYTES = 1 << 24
_POINTERS_KEPT = 2  # one damaged file must not lose everything
Described = dict[str, dict[str, Any]]  # file → its object's name, bytes and checksum


@final
class ObjectStore:
    """A folder in shared storage.

    Arguments:
        url: its address, such as s3://bucket/runs or file:///shared/runs.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.name = without_password(url)
        from fsspec.core import url_to_fs  # slow to import, and rarely needed

        try:
            self._system, root = url_to_fs(self.url)
            self._root = str(root).rstrip("/")
            self._check_bucket()
        except Exception as error:  # every kind of storage has errors of its own
            problem = "cannot be reached"
            if isinstance(error, ImportError):
                problem = "needs another package"
            elif isinstance(error, ValueError | TypeError | PermissionError | FileNotFoundError):
                problem = "cannot be used as storage"
            raise ConfigError(f"{self.name} {problem}: {_reason(error)}") from error

    def _check_bucket(self) -> None:
        """Reject an object store whose bucket is missing or closed to us."""
        if not self._bucket:
            return
        try:
            self._system.info(self._bucket)
        except FileNotFoundError as error:
            missing = f"there is no bucket {self._bucket}"
            raise FileNotFoundError(missing) from error
        except PermissionError:  # for the whole bucket; a folder of it may be ours
            with suppress(FileNotFoundError):
                self._system.ls(self._root, detail=False)

    @property
    def _bucket(self) -> str:
        """The bucket or container of an object store, which has no folders; "" elsewhere."""
        has_folders = self._root.startswith("/") or self.path is not None
        return "" if has_folders else self._root.partition("/")[0]

    def within(self, name: str) -> Self:
        """A folder in it."""
        inner = copy(self)
        inner.url, inner.name = f"{self.url}/{name}", f"{self.name}/{name}"
        inner._root = f"{self._root}/{name}"
        return inner

    @property
    def path(self) -> Path | None:
        """Its path, if it is on a file system of this machine and can be locked."""
        own = self._system.protocol
        return Path(self._root) if "file" in ((own,) if isinstance(own, str) else own) else None

    def names(self) -> list[str]:
        """All files below it."""
        with self._access("", "read"):
            self._system.invalidate_cache()
            try:
                found = self._system.find(self._root)
            except FileNotFoundError:
                return []
        roots = (f"{self._root}/", f"{self._root.lstrip('/')}/")
        names = [next((n[len(r) :] for r in roots if n.startswith(r)), "") for n in found]
        return sorted(name for name in names if name)

    def size(self, name: str) -> int:
        """Bytes of a file."""
        with self._access(name, "read"):
            return int(self._system.size(self._at(name)))

    def read(self, name: str, most: int) -> bytes:
        """The content of a file of at most this many bytes."""
        if self.size(name) > most:
            raise TraceError(f"{self.name}/{name} is larger than the {most} bytes allowed")
        with self._access(name, "read"):
            return bytes(self._system.cat_file(self._at(name)))

    def get(self, name: str, file: Path) -> None:
        """Download a file."""

        def copy(temporary: Path) -> None:
            with self._access(name, "read"):
                self._system.get_file(self._at(name), str(temporary))

        write_atomically(file, copy)

    def put(self, file: Path, name: str) -> None:
        """Upload a file, under a name that is new or that nobody reads yet."""
        with self._access(name, "written"):
            self._make_folder(name)
            self._system.put_file(str(file), self._at(name))

    def replace(self, file: Path, name: str) -> None:
        """Upload a file; its name shows the old one or the whole new one, never a part."""
        folder, _, last = name.rpartition("/")
        temporary = f"{folder}/" * bool(folder) + f".{last}.{secrets.token_hex(4)}"
        self.put(file, temporary)
        with self._access(name, "written"):
            self._system.mv(self._at(temporary), self._at(name))

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        with self._access(name, "written"):
            self._make_folder(name)
            self._system.pipe_file(self._at(name), content)

    def remove(self, name: str, *, folder: bool = False) -> None:
        """Remove a file, or a folder with all in it, if it exists."""
        with self._access(name, "written"):
            self._system.invalidate_cache()
            if self._system.exists(self._at(name)):
                if folder:
                    self._system.rm(self._at(name), recursive=True)
                else:
                    self._system.rm_file(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_folder(self, name: str) -> None:
        if self._bucket:  # nobody but its owner should create that
            return
        self._system.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _access(self, name: str, done: str) -> Iterator[None]:
        """Turn the storage's own errors into one that names the file that cannot be `done`."""
        kind = TraceError if done == "read" else UnwritableError
        try:
            yield
        except Exception as error:  # every kind of storage has errors of its own
            missing = isinstance(error, FileNotFoundError) and done == "read"
            if missing or isinstance(error, ForgetlessError):
                raise
            raise kind(f"{self.name}/{name} cannot be {done}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    reason: str = getattr(error, "strerror", None) or first_line(error)
    return reason[:200]


@final
class Mirror:
    """A job's folder on this machine and its copy in shared storage.

    Arguments:
        folder: of the job, on this machine.
        storage: of the job.
        run: storage of the run, where the files of the seeds go.
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
        """Download the latest checkpoint that is whole, if there is any.

        Arguments:
            only: what the names of the files must begin with.
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
                message = f"{problem}; the run resumes from the checkpoint before it"
                warnings.warn(message, ForgetlessWarning, stacklevel=2)
            return
        if problem is not None:
            raise TraceError(
                f"{problem}, and nothing before it can be used; --overwrite starts anew"
            )

    def save(self) -> None:
        """Upload the folder as it is; a failure is a warning, and the run continues."""
        try:
            self._save()
        except (UnwritableError, TraceError, FileNotFoundError) as error:
            message = f"a checkpoint was not copied, the next one will be: {error}"
            warnings.warn(message, ForgetlessWarning, stacklevel=2)

    def publish(self) -> None:
        """Upload the results of the finished job: weights and memories first, its trace last."""
        own = {f.relative_to(self._folder).as_posix(): f for f in self._folder.glob("seed-*/*")}
        for name, file in own.items():
            self._run.put(file, name)
        seeds = {name.split("/")[0] for name in own}
        for name in self._run.names():
            if name.split("/")[0] in seeds and name not in own:
                self._run.remove(name)  # of the run that this one replaces
        self._storage.replace(self._folder / TRACE_FILE, TRACE_FILE)
        self._storage.remove(SAVED, folder=True)

    def _save(self) -> None:
        described: Described = {}
        for file in sorted(self._folder.rglob("*")):
            name = file.relative_to(self._folder).as_posix()
            if not file.is_file() or not _is_of_run(name):
                continue
            stat = file.stat()
            stamp = stat.st_size, stat.st_mtime_ns
            if self._sent.get(name, (None,))[0] != stamp:
                self._count += 1
                place = f"{self._attempt}-{self._count:06d}-{file.name}"
                self._storage.put(file, f"{SAVED}/{place}")
                entry = {"object": place, "bytes": stat.st_size, "blake2b": digest(file)}
                self._sent[name] = stamp, entry
            described[name] = self._sent[name][1]
        there = [n.removeprefix(f"{SAVED}/") for n in self._storage.names() if n.startswith(SAVED)]
        numbers = [int(m[1]) for m in map(_POINTER.fullmatch, there) if m]
        pointer = f"pointer-{1 + max(numbers, default=0):06d}-{self._attempt}.json"
        content = json.dumps({"blake2b": checksum(described), "files": described}).encode()
        self._storage.write(f"{SAVED}/{pointer}", content)
        self._written = [*self._written, (pointer, described)][-_POINTERS_KEPT:]
        needed = {name for name, _ in self._written}
        needed |= {entry["object"] for _, files in self._written for entry in files.values()}
        if len(self._written) == _POINTERS_KEPT:  # files of earlier attempts stay until then
            for name in set(there) - needed:
                self._storage.remove(f"{SAVED}/{name}")

    def _read(self, pointer: str) -> Described:
        content = self._storage.read(f"{SAVED}/{pointer}", _MOST_POINTER_BYTES)
        try:
            record = json.loads(content)
            files: Described = record["files"]
            if record["blake2b"] != checksum(files):
                raise ValueError("its checksum is another")
            for name, entry in files.items():
                if not (_is_of_run(name) and _OBJECT.fullmatch(entry["object"])):
                    raise ValueError(f"{ascii(name)[:80]} is no file of a run")
                if not (type(entry["bytes"]) is int and type(entry["blake2b"]) is str):
                    raise ValueError(f"{ascii(name)[:80]} has no size and checksum")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise TraceError(f"{pointer} cannot be used: {_reason(error)}") from error
        return files

    def _get(self, name: str, entry: dict[str, Any]) -> None:
        place, file = f"{SAVED}/{entry['object']}", self._folder / name
        if self._storage.size(place) != entry["bytes"]:
            raise TraceError(f"{name} has another size")
        self._storage.get(place, file)
        if digest(file) != entry["blake2b"]:
            raise TraceError(f"{name} has another checksum")


def _is_of_run(name: str) -> bool:
    patterns = (_CHECKPOINT, _SEED)
    return name == TRACE_FILE or any(pattern.fullmatch(name) for pattern in patterns)


def _pointers(names: Iterable[str]) -> list[str]:
    """The pointers of a job's storage, the newest first."""
    found = (_POINTER.fullmatch(n.removeprefix(f"{SAVED}/")) for n in names if n.startswith(SAVED))
    return [m[0] for m in sorted((m for m in found if m), key=lambda m: -int(m[1]))]


def download_state(url: str, folder: Path) -> None:
    """Download what says how far a run is: its traces, and the manifests of its checkpoints."""
    run = ObjectStore(url)
    names = run.names()
    for name in filter(_TRACE.fullmatch, names):
        run.get(name, folder / name)
    saved = re.compile(rf"((?:{_JOB})?){SAVED}/{_POINTER.pattern}")
    for place in {m[1].rstrip("/") for m in map(saved.fullmatch, names) if m}:
        storage = run.within(place) if place else run
        Mirror(folder / place, storage, run).fetch(only="checkpoint/manifest")


def download(url: str, folder: Path) -> None:
    """Download the results of a run's finished jobs."""
    run = ObjectStore(url)
    shutil.rmtree(folder, ignore_errors=True)
    for name in run.names():
        if _TRACE.fullmatch(name) or _SEED.fullmatch(name):
            run.get(name, folder / name)


def publish(url: str, folder: Path, seeds: Iterable[int]) -> None:
    """Upload the merged trace of a run, and remove whatever is not of the run."""
    if not is_trace(folder):
        return
    run = ObjectStore(url)
    run.replace(folder / TRACE_FILE, TRACE_FILE)
    own = {f"seed-{seed}" for seed in seeds} | {TRACE_FILE}
    for name in {name.split("/")[0] for name in run.names()} - own | {JOBS}:
        run.remove(name, folder=True)


@contextmanager
def local_copy(url: str) -> Iterator[Path]:
    """A temporary local folder for what is in shared storage.

    Storage on a file system of this machine is locked meanwhile; other kinds have no locks. Errors
    name the storage in place of the folder.
    """
    storage = ObjectStore(url)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="forgetless-"))
        folder = Path(scratch) / "out"
        if storage.path is not None:
            stack.enter_context(FolderLock(storage.path))
        try:
            yield folder
        except TraceError as error:
            if str(folder) not in str(error):
                raise
            raise TraceError(str(error).replace(str(folder), storage.name)) from error


def upload(folder: Path, url: str, names: Iterable[str]) -> None:
    """Upload those of these files that the folder has."""
    storage = ObjectStore(url)
    for name in names:
        if (folder / name).is_file():
            storage.replace(folder / name, name)
