"""A pickle is read as data: what it would like to run is refused by name."""

import pickle
import struct
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgetless.data.restricted_pickle import ByteArray, load_plain_pickle
from forgetless.support.validation import DataError

PATH = Path("folder/train")
ARRAY = np.arange(12, dtype=np.uint8).reshape(3, 4) + 120  # some of it is beyond ASCII
FIELDS = {b"data": ARRAY, b"fine_labels": [3, 1, 2], b"filenames": [b"a.png", b"b.png"]}
HONEST = pickle.dumps(FIELDS, protocol=2)

NDARRAY = b"cnumpy\nndarray\n"
RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
DTYPE = b"cnumpy\ndtype\n"
EMPTY_ARRAY = RECONSTRUCT + NDARRAY + b"K\x00\x85U\x01b\x87R"
BYTE_DTYPE = DTYPE + b"U\x02u1K\x00K\x01\x87R"


class Calls:
    """Pickles as a call of any function with any arguments."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def refused(content: bytes, reason: str | None = None) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        load_plain_pickle(content, PATH)
    assert "folder/train" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_python_3_writes_is_read() -> None:
    value = load_plain_pickle(HONEST, PATH)
    assert value == {
        b"data": ByteArray((3, 4), ARRAY.tobytes()),
        b"fine_labels": [3, 1, 2],
        b"filenames": [b"a.png", b"b.png"],
    }


def test_what_python_2_wrote_is_read() -> None:
    state = b"(K\x01K\x03K\x04\x86" + BYTE_DTYPE
    state += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
    array = EMPTY_ARRAY + b"q\x04" + state + struct.pack("<i", 12) + ARRAY.tobytes() + b"tb"
    content = b"\x80\x02}q\x01(U\x04dataq\x02" + array + b"U\x06labelsq\x05](K\x07M\x10'eu."
    assert load_plain_pickle(content, PATH) == {
        b"data": ByteArray((3, 4), ARRAY.tobytes()),
        b"labels": [7, 10000],
    }


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_command_is_run(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    attack = Calls(subprocess.call, ["touch", str(marker)])
    refused(pickle.dumps({b"data": attack}, protocol=protocol))
    assert not marker.exists()
    pickle.loads(pickle.dumps(attack))  # the attack is a real one
    assert marker.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("__builtin__", "eval"),
        ("builtins", "getattr"),
        ("numpy", "load"),
        ("numpy.core.multiarray", "scalar"),
        ("_codecs", "decode"),
        ("forgetless.data.restricted_pickle", "_NdarrayType"),
    ],
)
def test_names_are_refused_by_name(module: str, name: str) -> None:
    content = f"c{module}\n{name}\nU\x04code\x85R.".encode("latin-1")
    refused(content, f"asks for '{module}.{name}'")


def test_names_cannot_garble_the_terminal() -> None:
    with pytest.raises(DataError) as caught:
        load_plain_pickle(b"c\x1b[2J\n" + 10_000 * b"x" + b"\n.", PATH)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("opcode", "content"),
    [
        ("INST", b"(iposix\nsystem\n."),
        ("OBJ", b"(cnumpy\nndarray\nK\x09o."),
        ("NEWOBJ", b"\x80\x02cnumpy\nndarray\nK\x09\x85\x81."),
        ("SHORT_BINUNICODE", b"\x80\x04\x8c\x02os\x8c\x06system\x93."),
        ("STACK_GLOBAL", b"\x80\x04U\x02osU\x06system\x93."),
        ("EXT1", b"\x80\x02\x82\x01."),
        ("PERSID", b"Pname\n."),
        ("BINPERSID", b"U\x04nameQ."),
        ("BYTEARRAY8", b"\x80\x05\x96" + struct.pack("<Q", 3) + b"abc."),
        ("DUP", b"N2."),
        ("POP", b"NN0."),
        ("FROZENSET", b"\x80\x04(N\x91."),
    ],
)
def test_other_opcodes_are_refused_by_name(opcode: str, content: bytes) -> None:
    refused(content, f"uses the opcode {opcode} at byte")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (NDARRAY + b"(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ft\x85R.", None),
        (RECONSTRUCT + NDARRAY + b"J\xff\xff\xff\x7f\x85U\x01b\x87R.", "created"),
        (RECONSTRUCT + b"NK\x00\x85U\x01b\x87R.", "created"),
        (EMPTY_ARRAY + b"(K\x01J\xff\xff\xff\x7f\x85" + BYTE_DTYPE + b"\x89U\x03abctb.", "fill"),
        (EMPTY_ARRAY + b"(K\x01K\x02\x85" + BYTE_DTYPE + b"\x89U\x03abctb.", "fill"),
        (EMPTY_ARRAY + b"(K\x01K\x03\x85" + BYTE_DTYPE + b"\x88U\x03abctb.", "C order"),
        (EMPTY_ARRAY + b"(K\x01K\x03\x85N\x89U\x03abctb.", "unsigned bytes"),
        (EMPTY_ARRAY + b"(K\x01K\x03\x85" + BYTE_DTYPE + b"\x89K\x03tb.", "not bytes"),
        (EMPTY_ARRAY + b"K\x01b.", "unknown form"),
        (DTYPE + b"U\x02O8K\x00K\x01\x87R.", "not made of unsigned bytes"),
        (DTYPE + b"U\x02f8K\x00K\x01\x87R.", "not made of unsigned bytes"),
        (BYTE_DTYPE + b"(K\x03]tb.", "state"),
        (NDARRAY + b"}U\x01aK\x01sb.", "state"),
        (RECONSTRUCT + b"}U\x01aK\x01sb.", "state"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.", "encodes"),
        (pickle.dumps(np.array([object()]), protocol=2), None),
        (pickle.dumps(np.zeros(3), protocol=2), "not made of unsigned bytes"),
        (pickle.dumps(np.asfortranarray(ARRAY), protocol=2), "C order"),
    ],
)
def test_arrays_of_another_form_are_refused(content: bytes, reason: str | None) -> None:
    refused(content, reason)


def test_deeply_nested_tuples_are_refused() -> None:
    # As a dictionary's key this would overflow the stack of the interpreter itself.
    refused(b"}N" + b"\x85" * 1_000_000 + b"Ns.", "nests tuples")
    refused(b"}N" + b"\x85q\x01" * 1_000_000 + b"Ns.", "nests tuples")


def test_nothing_makes_it_allocate_without_bound() -> None:
    attacks = [
        b"Nr\xff\xff\xff\x00.",  # a memo with sixteen million entries
        b"Nr\xff\xff\xff\x7f.",  # a memo with two thousand million entries
        b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
        b"T\xff\xff\xff\x7fabc.",  # two thousand million bytes, of which three are there
        b"X\xff\xff\xff\xffabc.",
        b"\x8e" + struct.pack("<Q", 2**40) + b"abc.",
        b"\x95" + struct.pack("<Q", 2**40) + b"abc.",
        b"\x8b\xff\xff\xff\x7fabc.",
    ]
    tracemalloc.start()
    try:
        for attack in attacks:
            refused(attack)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000


def test_one_text_cannot_be_encoded_again_and_again() -> None:
    text = b"X" + struct.pack("<I", 1_000_000) + 1_000_000 * b"a"
    start = b"](c_codecs\nencode\nq\x00" + text + b"q\x01X\x06\x00\x00\x00latin1q\x02"
    refused(start + 1_000 * b"h\x00h\x01h\x02\x86R" + b"e.", "encodes more text")


@pytest.mark.parametrize("content", [b"", b".", b"N", b"N.N.", b"\x80\x02", b"h\x07.", b"}K\x01s."])
def test_broken_pickles_are_refused(content: bytes) -> None:
    refused(content)


@given(st.integers(0, len(HONEST) - 1))
def test_truncated_pickles_are_refused(length: int) -> None:
    refused(HONEST[:length])


def reads_or_refuses(content: bytes) -> None:
    try:
        load_plain_pickle(content, PATH)
    except DataError:
        return


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(content: bytes) -> None:
    reads_or_refuses(content)


@given(st.lists(st.tuples(st.integers(0, len(HONEST) - 1), st.integers(0, 255)), max_size=4))
def test_changed_bytes_raise_nothing_else(changes: list[tuple[int, int]]) -> None:
    content = bytearray(HONEST)
    for position, value in changes:
        content[position] = value
    reads_or_refuses(bytes(content))


PIECES = [
    *(bytes([code]) for code in b".(N\x88\x89]a}eust\x85\x86\x87Rb"),
    *(b"K\x00", b"K\x03", b"J\xff\xff\xff\xff", b"U\x03abc", b"U\x02u1", b"X\x01\x00\x00\x00a"),
    *(b"X\x06\x00\x00\x00latin1", b"q\x00", b"q\x01", b"h\x00", b"h\x01", b"c_codecs\nencode\n"),
    *(NDARRAY, RECONSTRUCT, DTYPE, EMPTY_ARRAY, BYTE_DTYPE),
]


@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_any_sequence_of_plain_opcodes_raises_nothing_else(pieces: list[bytes]) -> None:
    reads_or_refuses(b"\x80\x02" + b"".join(pieces) + b".")


def test_values_that_are_not_arrays_pass_unchanged() -> None:
    value: dict[str, Any] = {"text": "ü", "list": [1, -2, None, True], "pair": (1, 2)}
    assert load_plain_pickle(pickle.dumps(value, protocol=2), PATH) == value
