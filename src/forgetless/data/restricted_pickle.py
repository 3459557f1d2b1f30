"""A reader for pickles of plain values and byte arrays that runs nothing a pickle may carry.

First the opcodes are screened, so that the unpickler meets no opcode but the few that such a file
needs, no length beyond the file's end and no absurd memo index (which would make it allocate
without bound). Then a `pickle.Unpickler` reads it that knows four names only, each of them a
stand-in defined here: numpy itself is never reached.
"""

import io
import math
import pickle
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from forgetless.data.files import DamagedFileError
from forgetless.support.errors import DataError

# What protocol 2 uses for plain values and for arrays; nothing else is let through.
VALUE_OPCODES = frozenset({"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"})
TEXT_OPCODES = frozenset({"SHORT_BINSTRING", "BINSTRING", "BINUNICODE"})
LIST_OPCODES = frozenset({"EMPTY_LIST", "APPEND", "APPENDS"})
DICT_OPCODES = frozenset({"EMPTY_DICT", "SETITEM", "SETITEMS"})
TUPLE_OPCODES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
PUT_OPCODES = frozenset({"BINPUT", "LONG_BINPUT"})
OTHER_OPCODES = frozenset(
    {"PROTO", "MARK", "BINGET", "LONG_BINGET", "GLOBAL", "REDUCE", "BUILD", "STOP"}
)
PLAIN_OPCODES = VALUE_OPCODES.union(
    TEXT_OPCODES, LIST_OPCODES, DICT_OPCODES, TUPLE_OPCODES, PUT_OPCODES, OTHER_OPCODES
)
# A tuple goes straight to the call or the state it was made for, except an array's two shapes.
# Bounding the others bounds how deep tuples nest: hashing a very deep one overflows the C stack.
MAX_LOOSE_TUPLES = 8
MAX_DIMENSIONS = 4
BYTE_DTYPES = ("u1", "|u1", b"u1", b"|u1")


@dataclass(frozen=True)
class ByteArray:
    """An array of unsigned bytes as a pickle describes it: its shape and its bytes, in C order."""

    shape: tuple[int, ...]
    content: bytes


def load_plain_pickle(content: bytes, path: Path) -> object:
    """The value in a protocol 2 pickle, with arrays of bytes as `ByteArray`; else `DataError`."""
    try:
        _screen_opcodes(content)
        return _finished(_PlainUnpickler(io.BytesIO(content), encoding="bytes").load())
    except _RefusedError as refusal:
        raise DamagedFileError(path, f"is not a plain pickle: {refusal}") from refusal
    except Exception as error:
        # A hostile or broken pickle can make the unpickler raise nearly anything; all of it means
        # the same to the reader of the message.
        raise DamagedFileError(path, f"is a broken pickle ({type(error).__name__})") from error


class _RefusedError(DataError):
    """Something in a pickle that a file of plain values does not use."""


def _screen_opcodes(content: bytes) -> None:
    """Refuse any opcode, memo index or nesting that a file of plain values does not need."""
    loose_tuples = 0
    pending_tuple = False  # a tuple was just made, and nothing has taken it yet
    for count, (name, argument, position) in enumerate(_opcodes(content), start=1):
        if name not in PLAIN_OPCODES:
            raise _RefusedError(f"it uses the opcode {name} at byte {position}")
        if name in PUT_OPCODES:
            # Writers number the memo 0, 1, 2, …; the unpickler allocates up to the index it meets.
            if not isinstance(argument, int) or argument > count:
                raise _RefusedError(f"it numbers a memo entry {argument} at byte {position}")
            continue
        if pending_tuple and name not in ("REDUCE", "BUILD"):
            loose_tuples += 1
            if loose_tuples > MAX_LOOSE_TUPLES:
                raise _RefusedError(f"it nests tuples at byte {position}")
        pending_tuple = name in TUPLE_OPCODES
        if name == "STOP" and position + 1 != len(content):
            raise _RefusedError(f"it goes on after its end at byte {position}")


def _opcodes(content: bytes) -> Iterator[tuple[str, object, int]]:
    """Name, argument and position of each opcode, parsed without building anything."""
    for opcode, argument, position in pickletools.genops(content):
        yield opcode.name, argument, -1 if position is None else position


class _StandIn:
    """What a pickle gets instead of a name it asks for; takes no state, and cannot be called."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        _refuse("it gives a state to something that has none")


class _NdarrayType(_StandIn):
    """Stands for the name `numpy.ndarray`, of use only as an argument of `_reconstruct`."""

    __slots__ = ()


class _ByteDtype(_StandIn):
    """Stands for `numpy.dtype("u1")`; its state says nothing that matters for single bytes."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        if type(state) is not tuple or not all(
            entry is None or type(entry) in (int, str, bytes) for entry in state
        ):
            _refuse("an array's type has a state that bytes do not have")


class _UnfinishedArray(_StandIn):
    """Stands for an array whose shape and bytes come with its state."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: ByteArray | None = None

    def __setstate__(self, state: object) -> None:
        if type(state) is not tuple or len(state) != 5:
            _refuse("an array has a state of an unknown form")
        _, shape, dtype, fortran_order, content = state
        if type(content) is not bytes:
            _refuse("an array's content is not bytes")
        if type(shape) is not tuple or len(shape) > MAX_DIMENSIONS:
            _refuse("an array has a shape of an unknown form")
        if not all(type(size) is int and 0 <= size <= len(content) for size in shape):
            _refuse("an array's shape is not made of sizes that its bytes could fill")
        if type(dtype) is not _ByteDtype or fortran_order not in (False, 0):
            _refuse("an array is not made of unsigned bytes in C order")
        if len(content) != math.prod(shape):
            _refuse("an array's bytes do not fill its shape")
        self.array = ByteArray(shape, content)


class _Reconstruct(_StandIn):
    """Stands for `numpy.core.multiarray._reconstruct`, which begins an empty array."""

    __slots__ = ()

    def __call__(self, *arguments: object) -> _UnfinishedArray:
        if len(arguments) != 3 or type(arguments[0]) is not _NdarrayType or arguments[1] != (0,):
            _refuse("an array is begun in an unknown way")
        return _UnfinishedArray()


class _DtypeType(_StandIn):
    """Stands for the name `numpy.dtype`; knows the unsigned byte only."""

    __slots__ = ()

    def __call__(self, *arguments: object) -> _ByteDtype:
        if not arguments or arguments[0] not in BYTE_DTYPES:
            _refuse("an array is not made of unsigned bytes")
        return _ByteDtype()


class _EncodeLatin1(_StandIn):
    """Stands for `_codecs.encode`, the way in which Python 3 writes bytes in protocol 2."""

    __slots__ = ()

    def __call__(self, *arguments: object) -> bytes:
        if len(arguments) != 2 or type(arguments[0]) is not str or arguments[1] != "latin1":
            _refuse("it encodes text in an unknown way")
        return arguments[0].encode("latin-1")


STAND_INS: dict[tuple[str, str], type[_StandIn]] = {
    ("numpy", "ndarray"): _NdarrayType,
    ("numpy", "dtype"): _DtypeType,
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct,
    ("_codecs", "encode"): _EncodeLatin1,
}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler whose every name is a stand-in, and which refuses all other names."""

    def find_class(self, module_name: str, global_name: str, /) -> _StandIn:
        stand_in = STAND_INS.get((module_name, global_name))
        if stand_in is None:
            # The name comes from the file: no control characters, and not at any length.
            _refuse(f"it asks for {ascii(f'{module_name}.{global_name}')[:80]}")
        return stand_in()


def _refuse(reason: str) -> NoReturn:
    raise _RefusedError(reason)


def _finished(value: object) -> object:
    """The value with its arrays as `ByteArray`, looking no deeper than one dictionary."""
    if isinstance(value, dict):
        return {key: _finished_array(entry) for key, entry in value.items()}
    return _finished_array(value)


def _finished_array(value: object) -> object:
    return value.array if isinstance(value, _UnfinishedArray) else value
