"""The worst-case toy."""

from forgetless.paper.artefacts import toy


def test_all_directions_are_taken_when_the_last_of_them_is():
    (line, _) = toy._full({f"500 {p}": {} for p in (200, 215, 500)})
    assert line.endswith("p = 200 after task 8, p = 215 after task 9.")
