"""What a run was made with: versions, machine, and fingerprints of the code that it used."""

import ast
import dis
import hashlib
import json
import platform
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, final

from forgetless.support.validation import first_line

if TYPE_CHECKING:  # `forgetless --version` must not wait for torch
    import torch

__version__ = "0.2.0"

_READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_STAR = "*"  # what `from module import *` binds
_INSTALLED = {"site-packages", "dist-packages"}


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


def digest_of(*parts: Any) -> str:
    """A checksum of tensors and arrays, with their shapes and types, and of plain values."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if hasattr(part, "detach"):  # a tensor, of a type that NumPy may not have
            import torch

            digest.update(f"{tuple(part.shape)} {part.dtype};".encode())
            flat = part.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data)
        elif hasattr(part, "tobytes"):
            digest.update(f"{part.shape} {part.dtype};".encode() + part.tobytes())
        else:
            digest.update(json.dumps(part, sort_keys=True, default=str).encode() + b";")
    return digest.hexdigest()


_NOT_OWN = (Path(sysconfig.get_path("stdlib")).resolve(), Path(__file__).resolve().parents[1])


def code_around(made: Any) -> str:
    """The statements of its file that a class or function uses, and the modules they import.

    A statement counts if it binds or changes a global name that what was found so far reads; a
    module counts as a whole, with its imports, if it is no installed package. Comments do not
    count, nor do other statements, such as those that train and print in a script.
    """
    file = getattr(sys.modules.get(str(getattr(made, "__module__", None))), "__file__", None)
    if file is None or not _is_own(Path(file).resolve()):
        return ""
    made = made if hasattr(made, "__qualname__") else type(made)
    own = vars(made).values() if isinstance(made, type) else [made]
    names = {name for part in own if hasattr(part, "__code__") for name in _read_by(part.__code__)}
    if "<locals>" not in made.__qualname__:
        names.add(made.__qualname__.partition(".")[0])
    place = Path(file).resolve()
    waiting = [(place, _used(_statements(place), names))]
    seen, texts = {place}, []
    while waiting:
        place, statements = waiting.pop()
        for statement in statements:
            texts.append(statement.text)
            for module in _imported(place, statement):
                if module not in seen:
                    seen.add(module)
                    waiting.append((module, list(_statements(module))))
    return "\n".join(texts)


def mistake_in(error: BaseException) -> str | None:
    """The line of a user's file that raised an exception, and what it is; None if none did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if (file := Path(f.filename)).is_file() and _is_own(file.resolve())]
    if not own:
        return None
    what = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
    return f"{own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}: {what}"


@final
@dataclass(frozen=True)
class _Statement:
    """A top-level statement of a file.

    Arguments:
        text: without comments.
        reads: the global names that it reads, or the functions in it.
        writes: the global names that it binds or whose value it may change.
        imports: level and name of modules, as in `from ..name import …`.
    """

    text: str
    reads: frozenset[str]
    writes: frozenset[str]
    imports: tuple[tuple[int, str], ...]


def _statements(file: Path) -> tuple[_Statement, ...]:
    """The statements of a file; none if it cannot be read."""
    try:
        return _parsed(file, file.stat().st_mtime_ns)
    except (OSError, SyntaxError, ValueError):
        return ()


@lru_cache(64)
def _parsed(file: Path, modified: int) -> tuple[_Statement, ...]:
    nodes = ast.parse(file.read_bytes()).body
    modules = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        for part in ast.walk(node)
        if isinstance(part, ast.Import | ast.ImportFrom)
        for alias in part.names
    }
    return tuple(_statement(node, modules) for node in nodes)


def _statement(node: ast.stmt, modules: set[str]) -> _Statement:
    code = compile(ast.Module([node], []), "statement", "exec", dont_inherit=True)
    imports: list[tuple[int, str]] = []
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            imports += [(0, alias.name) for alias in part.names]
        elif isinstance(part, ast.ImportFrom):
            # What is imported may be a module itself.
            below = [".".join(filter(None, (part.module, alias.name))) for alias in part.names]
            imports += [(part.level, name) for name in (part.module, *below) if name]
    writes = {*_bound_by(code), *_changed_by(node, modules)}
    return _Statement(
        ast.unparse(node), frozenset(_read_by(code)), frozenset(writes), tuple(imports)
    )


def _read_by(code: CodeType) -> Iterator[str]:
    """The global names that code reads, with the functions and classes in it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _read_by(constant)


def _bound_by(code: CodeType) -> Iterator[str]:
    """The global names that a statement binds, itself or by `global` in its functions."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_NAME", "STORE_GLOBAL"):
            yield instruction.argval
        if instruction.opname == "CALL_INTRINSIC_1" and "STAR" in instruction.argrepr:
            yield _STAR
        if instruction.opname == "IMPORT_STAR":
            yield _STAR
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = dis.get_instructions(constant)
            yield from (i.argval for i in inner if i.opname == "STORE_GLOBAL")


def _changed_by(node: ast.AST, modules: set[str]) -> Iterator[str]:
    """The global names with an item or attribute set, or a method called: `table.update(…)`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return
    target: ast.AST | None = None
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        target = node
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if called and isinstance(node.value.func, ast.Attribute):  # type: ignore[attr-defined]
        target = node.value.func  # type: ignore[attr-defined]
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    # A module's function, such as forgetless.fit(…), does not change the module.
    if isinstance(target, ast.Name) and not (called and target.id in modules):
        yield target.id
    for part in ast.iter_child_nodes(node):
        yield from _changed_by(part, modules)


def _used(statements: tuple[_Statement, ...], names: set[str]) -> list[_Statement]:
    """The statements that these names need, in order."""
    names = names | {_STAR}
    while True:
        used = [statement for statement in statements if statement.writes & names]
        more = names.union(*(statement.reads for statement in used))
        if more == names:
            return used
        names = more


def _imported(file: Path, statement: _Statement) -> Iterator[Path]:
    """The files of the user's own modules that a statement of a file imports."""
    root = file.parent  # of the package that the file belongs to
    while (root / "__init__.py").is_file():
        root = root.parent
    for level, name in statement.imports:
        folders = [file.parents[min(level, len(file.parents)) - 1]]
        if level == 0:
            folders = [file.parent, root, *map(Path, sys.path)]
        parts = name.split(".")
        for count in range(1, len(parts) + 1):  # a package is executed before its modules
            found = _module_file(folders, parts[:count])
            if found is not None and _is_own(found):
                yield found


def _module_file(folders: list[Path], parts: list[str]) -> Path | None:
    """The first file in the folders that is the module of that name."""
    for folder in folders:
        place = folder.joinpath(*parts)
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                return file.resolve()
    return None


def _is_own(file: Path) -> bool:
    """Whether a file is the user's: no installed package, and not this one."""
    installed = not _INSTALLED.isdisjoint(file.parts)
    return not installed and not any(file.is_relative_to(folder) for folder in _NOT_OWN)
