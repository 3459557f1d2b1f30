"""The numbers of docs/scale.md are those that were measured and worked out."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[3]


def _benchmark():
    spec = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks" / "scale.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_and_what_was_counted():
    text = (ROOT / "docs" / "scale.md").read_text("utf-8")
    read = {
        name: json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text("utf-8"))
        for name in ("scale", "large")
    }
    benchmark = _benchmark()
    assert benchmark.worked(read["large"]) == read["scale"]["worked"]
    assert benchmark.page(read["scale"]["worked"]) in text
    for row in read["scale"]["measured"]:
        name = "DDP" if row["wrap"] != "fully_shard" else "`fully_shard`"
        step = f"1 call, {row['step_bytes']} B" if row["step_calls"] else "nothing"
        assert f"| {name} | {row['tasks']} | {step} | {row['end_task_calls']} calls, " in text
