"""Every reader of files, each with a sound example and ways to spoil it."""

import gzip
import hashlib
import io
import json
import pickle
import random
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from forgetless import (
    AGEM,
    EWC,
    GPM,
    OGD,
    PCAOGD,
    Guard,
    Joint,
    KFACLaplace,
    KronEWC,
    KronOGD,
    Trace,
    load_trace,
)
from forgetless.data import cifar10, features
from forgetless.data.cifar import PIXELS_PER_IMAGE, ROW_BYTES, rows_from_binary, rows_from_pickle
from forgetless.data.files import check_labels, gunzip_bounded, parse_idx
from forgetless.guard.frameworks.base import FILE, GuardCarrier
from forgetless.launch.search import SEARCH_FILE, best_configs, load_search, tune
from forgetless.support.validation import DataError, ForgetlessError, ForgetlessWarning
from forgetless.trace.checkpoint import CHECKPOINTS
from forgetless.training.build import make_learner
from forgetless.training.resume import Saver
from tests.conftest import blobs

from .problems import TRAINING, Plug, small_run, stopped_run

SHAPE = (3, 4, 4)
N_IMAGES = 2
NOWHERE = Path("fuzzed")
METHODS = {
    "ogd": OGD(3), "pca-ogd": PCAOGD(2, 8), "ewc": EWC(), "a-gem": AGEM(4, 2), "joint": Joint(4),
    "gpm": GPM(samples=8), "kron-ogd": KronOGD(samples=8), "kfac-laplace": KFACLaplace(samples=8),
    "kron-ewc": KronEWC(samples=8),
}  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """A function that reads bytes, refusing what is not sound with a `ForgetlessError`.

    Arguments:
        read: the function.
        sound: what it accepts.
        spoil: how a sound one is changed, from a seed; None for changes of single bytes only.
    """

    read: Callable[[bytes], object]
    sound: bytes
    spoil: Callable[[bytes, random.Random], bytes] | None = None

    def survives(self, content: bytes) -> bool:
        """Whether it is accepted; anything but a clean refusal is raised."""
        try:
            self.read(content)
        except ForgetlessError as error:
            if "\n" in str(error):
                raise AssertionError(f"more than one sentence: {error}") from error
            return False
        return True


def inputs(reader: Reader) -> st.SearchStrategy[bytes]:
    """Random bytes, sound ones with some bytes changed, cut or repeated, and spoiled ones."""
    size = len(reader.sound)
    place = st.integers(0, max(0, size - 1))
    change = st.tuples(place, st.integers(0, 2), st.binary(min_size=1, max_size=8))
    damaged = st.lists(change, min_size=1, max_size=4).map(lambda c: _changed(reader.sound, c))
    ways = [st.binary(max_size=200), damaged, damaged]
    if reader.spoil is not None:
        spoil = reader.spoil
        seeds = st.integers(0, 2**48)
        ways += [seeds.map(lambda s: spoil(reader.sound, random.Random(s)))] * 3
    return st.one_of(ways)


def _changed(content: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for place, how, new in changes:
        if how == 0:
            content = content[:place] + new + content[place + len(new) :]
        elif how == 1:
            content = content[:place]
        else:
            content = content[:place] + new + content[place:]
    return content


ODD = [None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1.5, float("nan"), "", "x", "\0", [], {}, [[]]]


def spoiled_json(value: Any, draw: random.Random, depth: int = 0) -> Any:
    """A JSON value with something in it left out, added or replaced."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        if draw.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: spoiled_json(value[key], draw, depth + 1)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        if draw.random() < 0.3:
            return value[:place] + value[place + 1 :]
        return [*value[:place], spoiled_json(value[place], draw, depth + 1), *value[place + 1 :]]
    return draw.choice([*ODD, value, [value], {"x": value}])


def spoiled_tensors(tensors: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Tensors by name with one left out, renamed, cut, of another type or of other values."""
    name = draw.choice(list(tensors))
    tensor, rest = tensors[name], {n: t for n, t in tensors.items() if n != name}
    how = draw.randrange(6)
    if how == 0:
        return rest
    if how == 1:
        return rest | {name + "x": tensor}
    if how == 2 and tensor.dim():
        return rest | {name: tensor[: draw.randrange(len(tensor) + 1)].clone()}
    if how == 3:
        return rest | {name: tensor.to(draw.choice([torch.int8, torch.float64, torch.bool]))}
    if how == 4:
        return rest | {name: tensor.flatten()}
    noise = torch.randint(0, 256, tensor.shape, generator=torch.Generator().manual_seed(how))
    return rest | {name: noise.to(tensor.dtype)}


def _json_spoiler(content: bytes, draw: random.Random) -> bytes:
    return json.dumps(spoiled_json(json.loads(content), draw)).encode()


def _tensor_spoiler(content: bytes, draw: random.Random) -> bytes:
    return save(spoiled_tensors(load(content), draw))


# --- datasets


def _idx() -> Reader:
    header = struct.pack(">BBBB3I", 0, 0, 8, 3, *SHAPE)
    sound = header + bytes(range(48))
    return Reader(lambda content: parse_idx(content, SHAPE, NOWHERE), sound)


def _gzipped_idx() -> Reader:
    sound = gzip.compress(_idx().sound, mtime=0)
    size = len(_idx().sound)

    def read(content: bytes) -> object:
        return parse_idx(gunzip_bounded(content, size, NOWHERE), SHAPE, NOWHERE)

    def spoil(content: bytes, draw: random.Random) -> bytes:
        # A stream that inflates to far more than it should.
        inner = draw.choice([_idx().sound * draw.randrange(1, 200), bytes(10**6)])
        return gzip.compress(inner[: draw.randrange(len(inner) + 1)], mtime=0)

    return Reader(read, sound, spoil)


def _cifar_binary() -> Reader:
    row = bytes([3, 7]) + bytes(range(256)) * 12

    def read(content: bytes) -> object:
        rows = np.frombuffer(rows_from_binary(content, N_IMAGES, NOWHERE), np.uint8)
        labels = torch.from_numpy(rows.reshape(N_IMAGES, ROW_BYTES)[:, 1].copy())
        return check_labels(labels, 100, NOWHERE)

    return Reader(read, row * N_IMAGES)


def _stored_features(folder: Path) -> Reader:
    file = folder / "features.safetensors"
    expected = torch.arange(12.0).view(4, 3)
    features._write(file, expected)

    def read(content: bytes) -> object:
        file.write_bytes(content)
        found = features._read(file, 4)
        if found is None:
            raise DataError("damaged features are made again")
        assert found.equal(expected)
        return found

    return Reader(read, file.read_bytes(), _tensor_spoiler)


class _Runs:
    """What must not happen: it counts how often something in a pickle was run."""

    count = 0

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _ran, ()


def _ran() -> int:
    _Runs.count += 1
    raise AssertionError("a pickle ran code")


def _pickled(fields: dict[Any, Any]) -> bytes:
    stream = io.BytesIO()
    pickle.Pickler(stream, protocol=2).dump(fields)
    return stream.getvalue()


def _cifar_python() -> Reader:
    pixels = np.arange(N_IMAGES * PIXELS_PER_IMAGE, dtype=np.uint8).reshape(N_IMAGES, -1)
    fields = {b"data": pixels, b"fine_labels": [1, 2], b"coarse_labels": [0, 1]}

    def spoil(content: bytes, draw: random.Random) -> bytes:
        key = draw.choice(list(fields))
        value = draw.choice([*ODD[:12], _Runs(), [3] * 5, [1, 200], pixels.T, {"a": _Runs()}])
        return _pickled({**fields, key: value})

    return Reader(lambda c: rows_from_pickle(c, N_IMAGES, NOWHERE), _pickled(fields), spoil)


def _cifar10_python() -> Reader:
    pixels = np.arange(N_IMAGES * PIXELS_PER_IMAGE, dtype=np.uint8).reshape(N_IMAGES, -1)
    fields = {b"data": pixels, b"labels": [1, 2]}

    def spoil(content: bytes, draw: random.Random) -> bytes:
        key = draw.choice(list(fields))
        value = draw.choice([*ODD[:12], _Runs(), [3] * 5, [1, 200], pixels.T, {"a": _Runs()}])
        return _pickled({**fields, key: value})

    return Reader(lambda c: cifar10.rows_from_pickle(c, N_IMAGES, NOWHERE), _pickled(fields), spoil)


# --- a run's folder


def _trace_record(folder: Path) -> Reader:
    sound = (small_run(folder / "trace").path / "trace.json").read_bytes()  # type: ignore[operator]
    file = folder / "fuzzed-trace" / "trace.json"
    file.parent.mkdir()

    def read(content: bytes) -> object:
        file.write_bytes(content)
        return load_trace(file.parent)

    return Reader(read, sound, _json_spoiler)


def _search(folder: Path) -> Reader:
    """The file of a search, read as `compare --best` does."""
    grid = {"lr": (0.05, 0.1), "ewc_strength": (10.0, 100.0)}
    quick = {"tasks": 1, "epochs": 1, "train_per_class": 4, "validation_per_class": 1}
    found = tune("rotated-digits", ["sgd", "ewc"], grid=grid, out=folder / "search", **quick)
    file = folder / "search" / SEARCH_FILE

    def read(content: bytes) -> object:
        file.write_bytes(content)
        return best_configs(load_search(file), "rotated-digits", None, {"seeds": "5"}, {})

    return Reader(read, found.as_text().encode(), _json_spoiler)


def _trace_weights(folder: Path) -> Reader:
    trace = load_trace(folder / "trace")
    file = folder / "trace" / "seed-0" / "task-01.safetensors"
    sound = file.read_bytes()

    def read(content: bytes) -> object:
        file.write_bytes(content)
        return trace.weights(0, 0)

    return Reader(read, sound, _tensor_spoiler)


def _checkpoint(folder: Path, part: str) -> Reader:
    """The manifest or a part of a checkpoint; `spoil` sets its checksums right again."""
    run = folder / "stopped"
    home = run / CHECKPOINTS
    manifest_file = max(home.glob("manifest-*.json"))
    for older in set(home.glob("manifest-*.json")) - {manifest_file}:
        older.unlink()
    whole = manifest_file.read_bytes()
    manifest = json.loads(whole)["manifest"]
    name = None if part == "manifest" else manifest["parts"][part]["file"]
    file = manifest_file if name is None else home / name
    sound = file.read_bytes()
    tasks = blobs(tasks=3)
    learner = make_learner(tasks, OGD(4), None, (0,), TRAINING, None, torch.device("cpu"))
    start = learner.network.theta.clone()

    def sealed(body: Any) -> bytes:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        checksum = hashlib.blake2b(text.encode()).hexdigest()
        return json.dumps({"blake2b": checksum, "manifest": body}).encode()

    def read(content: bytes) -> object:
        if name is not None:
            described = {"file": name, "bytes": len(content)}
            described["blake2b"] = hashlib.blake2b(content).hexdigest()
            parts = manifest["parts"] | {part: described}
            manifest_file.write_bytes(sealed(manifest | {"parts": parts}))
        file.write_bytes(content)
        shape = (2, 3, 3)
        trace = Trace("blobs", "ogd", (0, 1), ("",) * 3, np.full(shape, np.nan), path=run)
        trace.timings = dict.fromkeys(("total", "training", "consolidation", "evaluation"), 0.0)
        saver = Saver(trace, manifest["settings"], 1.0)
        learner.network.theta.copy_(start)
        try:
            with warnings.catch_warnings(), torch.random.fork_rng():
                warnings.simplefilter("ignore", ForgetlessWarning)  # of other versions
                saved = saver.load()
                if saved is not None and saved.has_learner:
                    saver.restore(saved, learner)
        finally:
            file.write_bytes(sound)
            manifest_file.write_bytes(whole)
        return None

    def spoil(content: bytes, draw: random.Random) -> bytes:
        if name is None:
            return sealed(spoiled_json(manifest, draw))
        return _tensor_spoiler(content, draw)

    return Reader(read, sound, spoil)


# --- a guard's state


def _guard_state(method: str, storage: str) -> Reader:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, METHODS[method], storage=storage)
    guard.end_task((torch.randn(10, 4), torch.arange(10) % 3))
    sound = save(guard.state_dict())

    def read(content: bytes) -> object:
        try:
            tensors = load(content)
        except Exception:  # safetensors' own refusal: no part of this program
            tensors = {}
        guard.load_state_dict(tensors)
        return guard.memory_report()

    def spoil(content: bytes, draw: random.Random) -> bytes:
        tensors = load(content)
        texts = [n for n in tensors if n.endswith(("header", "layout", "structure", "names"))]
        if draw.random() < 0.5:
            return save(spoiled_tensors(tensors, draw))
        name = draw.choice(texts)
        spoiled = {name: spoiled_json(json.loads(bytes(tensors[name].tolist())), draw)}
        if name.startswith("memory.") and draw.random() < 0.9:  # with a header that agrees
            header = json.loads(bytes(tensors["header"].tolist()))
            length = len(json.dumps(spoiled[name]).encode())
            header["memory"][name.removeprefix("memory.")] = [[length], "uint8"]
            spoiled["header"] = header
        texts = {n: bytearray(json.dumps(value).encode()) for n, value in spoiled.items()}
        return save(tensors | {n: torch.frombuffer(t, dtype=torch.uint8) for n, t in texts.items()})

    return Reader(read, sound, spoil)


def _guard_file(folder: Path) -> Reader:
    """The file that a callback finds next to a checkpoint."""
    folder.mkdir()
    carrier = GuardCarrier(METHODS["ogd"], {})

    def read(content: bytes) -> object:
        (folder / FILE).write_bytes(content)
        carrier.load(folder)
        return carrier.state_dict()

    return Reader(read, _guard_state("ogd", "dense").sound)


@contextmanager
def all_readers(plug: Plug) -> Iterator[dict[str, Reader]]:
    """Every reader by name, with a folder for those that read one."""
    from tests.launch.engines.pointers import pointer_reader  # which needs what is above

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stopped_run(folder / "stopped", plug, 14)
        guards = {
            f"guard state, {method}, {storage}": _guard_state(method, storage)
            for method, storage in (
                ("ogd", "dense"), ("ogd", "factored"), ("pca-ogd", "bfloat16"), ("ewc", "dense"),
                ("a-gem", "dense"), ("joint", "dense"), ("gpm", "dense"), ("kron-ogd", "dense"),
                ("kfac-laplace", "dense"), ("kron-ewc", "dense"),
            )
        }  # fmt: skip
        yield {
            "IDX": _idx(),
            "IDX, gzipped": _gzipped_idx(),
            "CIFAR-100, binary": _cifar_binary(),
            "CIFAR-100, Python": _cifar_python(),
            "CIFAR-10, Python": _cifar10_python(),
            "features": _stored_features(folder),
            "trace, record": _trace_record(folder),
            "trace, weights": _trace_weights(folder),
            "search": _search(folder),
            **{
                f"checkpoint, {p}": _checkpoint(folder, p)
                for p in ("manifest", "progress", "memory")
            },
            **guards,
            "guard, file of a callback": _guard_file(folder / "callback"),
            "shared storage, pointer": pointer_reader(folder / "pointer"),
        }
