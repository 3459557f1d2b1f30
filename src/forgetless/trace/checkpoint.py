"""Checkpoints on disk: tensors in safetensors files, and a manifest with their checksums.

    checkpoint/manifest-000007.json              plain values, names of files, checksums
    checkpoint/part-000007-progress.safetensors  weights, generators, …
    checkpoint/part-000005-memory.safetensors    the method's state, written once a task

A checkpoint exists once its manifest does, which is written last. The newest two are retained, and
the newest with another memory file, so that no single damaged file invalidates them all.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from forgetless.support.files import write_atomically
from forgetless.support.validation import ForgetlessWarning, TraceError, first_line

CHECKPOINTS = "checkpoint"
FORMAT = 1
_MANIFEST = re.compile(r"manifest-(\d{6,12})\.json")
_PART = re.compile(r"part-\d{6,12}-[a-z]+\.safetensors")
_MOST_MANIFEST_BYTES = 1 << 24
Tensors = dict[str, Tensor]


@final
@dataclass(frozen=True)
class Checkpoint:
    """A saved state: plain values in `body`, tensors by part and name."""

    body: dict[str, Any]
    parts: dict[str, Tensors]


class _UnusableError(TraceError):
    """A checkpoint that cannot be read; the one before it may be readable."""


@final
class Store:
    """The checkpoints of one run.

    Arguments:
        folder: their folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts: dict[str, dict[str, Any]] = {}

    def exists(self) -> bool:
        """Whether there is a checkpoint, readable or not."""
        return any(True for _ in self._manifests())

    def write(
        self, body: Mapping[str, Any], parts: Mapping[str, Mapping[str, Tensor] | None]
    ) -> None:
        """Save a checkpoint; if that fails, the earlier ones stay valid.

        Arguments:
            body: plain values.
            parts: tensors by part and name; None for a part that has not changed since the last.
        """
        number = 1 + max((n for n, _ in self._manifests()), default=0)
        described = {}
        for part, tensors in parts.items():
            if tensors is None:
                described[part] = self._parts[part]
                continue
            file = self.folder / f"part-{number:06d}-{part}.safetensors"
            own = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
            found: list[str] = []

            def written(temporary: Path, own: Tensors = own, found: list[str] = found) -> None:
                save_file(own, temporary)
                found.append(digest(temporary))

            write_atomically(file, written)
            described[part] = {
                "file": file.name, "bytes": file.stat().st_size, "blake2b": found[0]
            }  # fmt: skip
        manifest = {"format": FORMAT, "parts": described, **body}
        text = json.dumps({"blake2b": checksum(manifest), "manifest": manifest})
        target = self.folder / f"manifest-{number:06d}.json"
        write_atomically(target, lambda file: file.write_text(text, "utf-8"))
        self._parts = described
        self._sweep()

    def manifest(self) -> dict[str, Any] | None:
        """The plain values of the newest readable checkpoint, None if there is none."""
        for _, file in self._manifests():
            try:
                return _read_manifest(file)
            except _UnusableError:
                continue
        return None

    def read(self) -> Checkpoint | None:
        """The newest readable checkpoint, None if there is none at all.

        A damaged one is reported in a warning and the one before it used; if none is readable, the
        error says why.
        """
        problems: list[str] = []
        for _, file in self._manifests():
            try:
                found = self._read(file)
            except _UnusableError as error:
                problems.append(str(error))
                continue
            if problems:
                words = f"{problems[0]}; the run resumes from the checkpoint before it"
                warnings.warn(words, ForgetlessWarning, stacklevel=2)
            return found
        if problems:
            raise TraceError(f"{problems[0]}, and no other can be used; --overwrite starts anew")
        return None

    def remove(self) -> None:
        """Remove all checkpoints: the run is finished, or starts again."""
        if self.folder.is_dir():
            for file in self.folder.iterdir():
                if _is_own(file.name):
                    file.unlink(missing_ok=True)
            if not any(self.folder.iterdir()):
                self.folder.rmdir()
        self._parts = {}

    def _manifests(self) -> Iterator[tuple[int, Path]]:
        """The numbers and files of manifests, the newest first."""
        if not self.folder.is_dir():
            return
        found = [(_MANIFEST.fullmatch(f.name), f) for f in self.folder.iterdir()]
        yield from sorted(((int(m[1]), f) for m, f in found if m), reverse=True)

    def _read(self, file: Path) -> Checkpoint:
        body = _read_manifest(file)
        described = body.pop("parts")
        parts = {part: self._read_part(entry, file) for part, entry in described.items()}
        self._parts = described
        return Checkpoint(body, parts)

    def _read_part(self, described: Any, manifest: Path) -> Tensors:
        try:
            name, size, wanted = (described[key] for key in ("file", "bytes", "blake2b"))
            if not _PART.fullmatch(name):
                raise ValueError(f"{ascii(name)[:80]} is not a part")
        except (TypeError, KeyError, ValueError) as error:
            raise _UnusableError(f"{manifest} is not a checkpoint: {error}") from error
        file = self.folder / name
        try:
            found = file.stat().st_size
            if found != size:
                raise _UnusableError(f"{file} is cut short: {found} bytes of {size}")
            if digest(file) != wanted:
                raise _UnusableError(f"{file} is damaged: its checksum differs")
            # Copies: a mapped file may be aligned otherwise than tensors, which changes rounding.
            return {n: t.clone() for n, t in load_file(file).items()}
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise _UnusableError(f"{file} cannot be read: {reason}") from error

    def _sweep(self) -> None:
        """Remove the files that no retained checkpoint needs, and temporary ones."""
        kept: list[tuple[Path, dict[str, Any]]] = []
        for _, file in self._manifests():
            try:
                parts = _read_manifest(file)["parts"]
            except _UnusableError:
                continue
            memories = [earlier.get("memory") for _, earlier in kept]
            one_memory = len(kept) == 2 and memories[0] == memories[1]
            if len(kept) < 2 or (one_memory and parts.get("memory") != memories[0]):
                kept.append((file, parts))
        names = {file.name for file, _ in kept}
        names |= {part["file"] for _, parts in kept for part in parts.values()}
        for file in self.folder.iterdir():
            if _is_own(file.name) and file.name not in names:
                file.unlink(missing_ok=True)


def _is_own(name: str) -> bool:
    """Whether a file is a checkpoint's or a temporary one."""
    return re.match(r"\.|(manifest|part)-\d{6}", name) is not None


def digest(file: Path) -> str:
    """The checksum of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def checksum(manifest: Mapping[str, Any]) -> str:
    """The checksum of plain values, in any order of their keys."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode()).hexdigest()


def _read_manifest(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            content = stream.read(_MOST_MANIFEST_BYTES + 1)
        if len(content) > _MOST_MANIFEST_BYTES:
            raise _UnusableError(f"{file} is larger than the {_MOST_MANIFEST_BYTES} bytes allowed")
        record = json.loads(content)
        manifest: dict[str, Any] = record["manifest"]
        sound = record["blake2b"] == checksum(manifest)
        version, parts = manifest["format"], manifest["parts"]
        if not isinstance(parts, dict):
            raise TypeError("its parts are not a table")
    except OSError as error:
        raise _UnusableError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, _UnusableError):
            raise
        reason = first_line(error)[:100]
        raise _UnusableError(f"{file} is cut short or damaged: {reason}") from error
    if not sound:
        raise _UnusableError(f"{file} is damaged: its checksum differs")
    if version != FORMAT:
        raise _UnusableError(
            f"{file} has format {ascii(version)[:20]}, and this version reads {FORMAT}"
        )
    return manifest
