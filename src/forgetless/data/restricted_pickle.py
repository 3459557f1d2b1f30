"""Read pickles of plain values and byte arrays without running anything that they name.

The opcodes are screened first: only those that such a file needs, no length beyond the end of the
file and no absurd memo index, which would make the unpickler allocate without bound. Then a
`pickle.Unpickler` reads the file; it knows four names, each a stand-in defined here, and never
reaches NumPy.
"""

import io
import math
import pickle
import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from forgetless.data.files import DamagedFileError
from forgetless.support.validation import DataError

# The opcodes of protocol 2 for plain values and arrays.
TUPLE_OPCODES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
PUT_OPCODES = frozenset({"BINPUT", "LONG_BINPUT"})
VALUE_OPCODES = frozenset({"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"})
TEXT_OPCODES = frozenset({"SHORT_BINSTRING", "BINSTRING", "BINUNICODE"})
LIST_OPCODES = frozenset({"EMPTY_LIST", "APPEND", "APPENDS"})
DICT_OPCODES = frozenset({"EMPTY_DICT", "SETITEM", "SETITEMS"})
OTHER_OPCODES = frozenset(
    {"PROTO", "MARK", "BINGET", "LONG_BINGET", "GLOBAL", "REDUCE", "BUILD", "STOP"}
)
PLAIN_OPCODES = VALUE_OPCODES.union(
    TEXT_OPCODES, LIST_OPCODES, DICT_OPCODES, TUPLE_OPCODES, PUT_OPCODES, OTHER_OPCODES
)
# A tuple is used at once by the call or the state it was made for, except the two shapes of an
# array. Limiting the others limits how deep tuples nest: hashing a very deep one overflows the C
# stack.
MAX_LOOSE_TUPLES = 8
MAX_DIMENSIONS = 4
BYTE_DTYPES = ("u1", "|u1", b"u1", b"|u1")


@dataclass(frozen=True)
class ByteArray:
    """An array of unsigned bytes: its shape, and its bytes in C order."""

    shape: tuple[int, ...]
    content: bytes


def load_plain_pickle(content: bytes, path: Path) -> object:
    """The value in a protocol 2 pickle, with arrays of bytes as `ByteArray`; else `DataError`."""
    try:
        _screen_opcodes(content)
        value = _PlainUnpickler(content).load()
    except _RefusedError as refusal:
        raise DamagedFileError(path, f"is not a plain pickle: {refusal}") from refusal
    except Exception as error:
        # A broken pickle makes the unpickler raise nearly anything; all of it means the same.
        raise DamagedFileError(path, f"is a broken pickle ({type(error).__name__})") from error
    if isinstance(value, dict):
        return {key: _finished(entry) for key, entry in value.items()}
    return _finished(value)


class _RefusedError(DataError):
    """Something that a pickle of plain values does not contain."""


def _refuse(reason: str) -> NoReturn:
    raise _RefusedError(reason)


def _screen_opcodes(content: bytes) -> None:
    """Reject any opcode, memo index or nesting that a file of plain values does not need."""
    loose_tuples = 0
    pending_tuple = False  # whether a tuple was just made and has not been used yet
    for count, (opcode, argument, at) in enumerate(pickletools.genops(content), start=1):
        name, position = opcode.name, -1 if at is None else at
        if name not in PLAIN_OPCODES:
            _refuse(f"it uses the opcode {name} at byte {position}")
        if name in PUT_OPCODES:
            # Writers number the memo 0, 1, 2, …; the unpickler allocates up to the index it meets.
            if not isinstance(argument, int) or argument > count:
                _refuse(f"it numbers a memo entry {argument} at byte {position}")
            continue
        loose_tuples += pending_tuple and name not in ("REDUCE", "BUILD")
        if loose_tuples > MAX_LOOSE_TUPLES:
            _refuse(f"it nests tuples at byte {position}")
        pending_tuple = name in TUPLE_OPCODES
        if name == "STOP" and position + 1 != len(content):
            _refuse(f"it continues after its end at byte {position}")


class _StandIn:
    """Replaces a name that a pickle asks for; takes no state, and cannot be called."""

    def __setstate__(self, state: object) -> None:
        _refuse("it gives a state to something that has none")


class _NdarrayType(_StandIn):
    """Replaces `numpy.ndarray`, of use only as an argument of `_reconstruct`."""


class _ByteDtype(_StandIn):
    """Replaces `numpy.dtype("u1")`; single bytes have no state that matters."""

    def __setstate__(self, state: object) -> None:
        if type(state) is not tuple or not all(
            entry is None or type(entry) in (int, str, bytes) for entry in state
        ):
            _refuse("the type of an array has a state that bytes do not have")


class _UnfinishedArray(_StandIn):
    """Replaces an array whose shape and bytes come with its state."""

    array: ByteArray | None = None

    def __setstate__(self, state: object) -> None:
        if type(state) is not tuple or len(state) != 5:
            _refuse("an array has a state of an unknown form")
        _, shape, dtype, fortran_order, content = state
        if type(content) is not bytes:
            _refuse("the content of an array is not bytes")
        if type(shape) is not tuple or len(shape) > MAX_DIMENSIONS:
            _refuse("an array has a shape of an unknown form")
        if not all(type(size) is int and 0 <= size <= len(content) for size in shape):
            _refuse("an array has a shape that its bytes could not fill")
        if type(dtype) is not _ByteDtype or fortran_order not in (False, 0):
            _refuse("an array is not made of unsigned bytes in C order")
        if len(content) != math.prod(shape):
            _refuse("the bytes of an array do not fill its shape")
        self.array = ByteArray(shape, content)


class _Reconstruct(_StandIn):
    """Replaces `numpy.core.multiarray._reconstruct`, which creates an empty array."""

    def __call__(self, *arguments: object) -> _UnfinishedArray:
        if len(arguments) != 3 or type(arguments[0]) is not _NdarrayType or arguments[1] != (0,):
            _refuse("an array is created in an unknown way")
        return _UnfinishedArray()


class _DtypeType(_StandIn):
    """Replaces `numpy.dtype`; knows the unsigned byte only."""

    def __call__(self, *arguments: object) -> _ByteDtype:
        if not arguments or arguments[0] not in BYTE_DTYPES:
            _refuse("an array is not made of unsigned bytes")
        return _ByteDtype()


class _EncodeLatin1(_StandIn):
    """Replaces `_codecs.encode`, by which Python 3 writes bytes in protocol 2."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed

    def __call__(self, *arguments: object) -> bytes:
        if len(arguments) != 2 or type(arguments[0]) is not str or arguments[1] != "latin1":
            _refuse("it encodes text in an unknown way")
        # Encoding one long text again and again must not fill the memory.
        self.allowed -= len(arguments[0])
        if self.allowed < 0:
            _refuse("it encodes more text than it contains")
        return arguments[0].encode("latin-1")


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that replaces four names by stand-ins and rejects all others."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.stand_ins = {
            "numpy.ndarray": _NdarrayType(),
            "numpy.dtype": _DtypeType(),
            "numpy.core.multiarray._reconstruct": _Reconstruct(),
            "numpy._core.multiarray._reconstruct": _Reconstruct(),
            "_codecs.encode": _EncodeLatin1(len(content)),
        }

    def find_class(self, module_name: str, global_name: str, /) -> _StandIn:
        name = f"{module_name}.{global_name}"
        if name not in self.stand_ins:
            # The name comes from the file: no control characters, and not at any length.
            _refuse(f"it asks for {ascii(name)[:80]}")
        return self.stand_ins[name]


def _finished(value: object) -> object:
    return value.array if isinstance(value, _UnfinishedArray) else value
