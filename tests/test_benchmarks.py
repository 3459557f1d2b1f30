"""The tables of the benchmarks are those of the committed measurements."""

from benchmarks import tables


def test_the_page_is_up_to_date():
    assert tables.page() == (tables.FOLDER / "README.md").read_text("utf-8")
    assert all(f"## {title}\n" in tables.page() for title, _, _ in tables.SECTIONS)


def test_a_benchmark_that_was_not_run_leaves_its_tables_out(tmp_path):
    assert tables.page(tmp_path) == tables.INTRODUCTION
