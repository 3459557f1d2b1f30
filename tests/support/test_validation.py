"""Reasons of errors, in a line."""

import pytest

from forgetless.support.validation import first_line


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one \ntwo"), "one"),
        (ValueError(), "ValueError"),
        (MemoryError(" \n"), "MemoryError"),
    ],
)
def test_the_first_line_of_an_error_says_something(error, reason):
    assert first_line(error) == reason
