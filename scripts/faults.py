"""Inject faults into runs, count what survives, and write the table of results/faults.

    python scripts/faults.py --kills 200      # all faults
    python scripts/faults.py --only engines   # only those of tests/launch/engines
    python scripts/faults.py --table          # only write README.md from the stored numbers

`scripts/fuzz.py` and `scripts/long_runs.py` measure the other two parts of the table.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "faults"
sys.path.insert(0, str(ROOT))

from tests.faults.server import METHODS, killed_runs  # noqa: E402
from tests.launch.engines.kills import killed_nodes, killed_workers  # noqa: E402

# Kind of fault → the tests that inject it, one fault per test.
KINDS = {
    "process ends abruptly between two steps, in consolidation or evaluation": (
        "test_every_method_goes_on", "test_every_storage_goes_on", "test_what_a_network_draws",
        "test_several_seeds", "test_stopped_again", "test_stopped_between", "test_without_checkp",
    ),
    "checkpoint cut, flipped, missing or of another version; an earlier one is intact": (
        "test_the_checkpoint_before", "test_no_single_file",
    ),
    "the same without an intact checkpoint: rejected, nothing changed": ("test_with_no_good_one",),
    "checkpoint of another configuration, of other data or another model": (
        "test_another_configuration", "test_a_checkpoint_with_right_checksums",
    ),
    "disk full, over quota, read-only or broken": ("test_disk.py",),
    "second process on the folder": ("test_lock.py",),
    "SIGTERM or Ctrl-C, in the command, a step, consolidation, evaluation, data": (
        "test_signals.py",
    ),
    "out of memory": ("test_out_of_memory",),
}  # fmt: skip
ENGINE_KINDS = {
    "worker or node killed during a run, repeatedly, with its command, or stopped with it": (
        "test_a_killed_worker", "test_one_that_dies", "test_who_stops_asking",
        "test_workers_end_when", "test_a_node_that_dies",
        "test_finished_jobs_are_not", "test_what_was_begun_as_a_whole",
        "test_a_run_goes_on_on_another_machine",
    ),
    "shared storage: files cut, changed or missing, paths outside of it, no connection": (
        "test_what_is_damaged_is_noticed", "test_a_pointer_reaches", "test_storage_that_fails",
    ),
}  # fmt: skip
WORKERS = "SIGKILL of a worker of --jobs at a random moment"
NODES = "SIGKILL of a node of a Ray cluster at a random moment"


class Count:
    """A pytest plugin that sorts outcomes by kind of fault."""

    def __init__(self, kinds: dict[str, tuple[str, ...]]) -> None:
        self.kinds = kinds
        self.found = {kind: {"injected": 0, "survived": 0, "lost": 0} for kind in kinds}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test when it was run."""
        if report.when != "call" or report.skipped:
            return
        for kind, names in self.kinds.items():
            if any(name in report.nodeid for name in names):
                self.found[kind]["injected"] += 1
                self.found[kind]["survived" if report.passed else "lost"] += 1


def inject(kills: int) -> dict[str, Any]:
    """Inject all faults; the numbers injected, survived and lost of each kind."""
    started = time.perf_counter()
    count = Count(KINDS)
    # The kills happen in other processes, in parallel with the tests.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        coming = pool.submit(killed_runs, Path(folder), kills, seed=0)
        pytest.main(
            ["-q", "-p", "no:cacheprovider", "-n", "0", str(ROOT / "tests" / "faults"),
             "-k", "not kill and not fuzz and not long"],
            plugins=[count],
        )  # fmt: skip
        killed = coming.result()
    moment = f"SIGKILL at a random moment, all {len(METHODS)} methods"
    kinds = {
        moment: {
            "injected": killed["killed"],
            "survived": killed["killed"] - len(killed["lost"]),
            "lost": len(killed["lost"]),
        }
    }
    return {
        "kinds": kinds | count.found,
        "kills_with_a_file_half_written": killed["during_write"],
        "traces_that_differ": killed["lost"],
        "python": platform.python_version(),
        "seconds": round(time.perf_counter() - started, 1),
    }


def inject_into_engines(kills: int) -> dict[str, dict[str, int]]:
    """The same for engines and shared storage."""
    count = Count(ENGINE_KINDS)
    tests = str(ROOT / "tests" / "launch" / "engines")
    pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", tests], plugins=[count])
    with tempfile.TemporaryDirectory() as folder:
        workers = killed_workers(Path(folder) / "workers", kills, seed=0)
        nodes = killed_nodes(Path(folder) / "nodes", kills // 2, seed=0)
    return {WORKERS: workers, NODES: nodes} | count.found


def table() -> str:
    """The results as Markdown."""
    faults = json.loads((RESULTS / "faults.json").read_text("utf-8"))
    rows = [
        f"| {kind} | {n['injected']} | {n['survived']} | {n['lost']} |"
        for kind, n in faults["kinds"].items()
    ]
    total = {
        k: sum(n[k] for n in faults["kinds"].values()) for k in ("injected", "survived", "lost")
    }
    lines = [
        "# Faults, injected and survived",
        "",
        "Made by `scripts/faults.py`, `scripts/fuzz.py` and `scripts/long_runs.py`; the promises",
        "are in [docs/reliability.md](../../docs/reliability.md). A run survives a fault if it",
        "resumes and ends with the trace of an uninterrupted run, bit for bit; or, if it cannot",
        "resume, if it is rejected in one sentence and no file is changed.",
        "",
        "| fault | injected | survived | lost |",
        "|---|---|---|---|",
        *rows,
        f"| **all** | **{total['injected']}** | **{total['survived']}** | **{total['lost']}** |",
        "",
        f"{faults['kills_with_a_file_half_written']} of the kills left a partly written file.",
        *([faults["note"]] if "note" in faults else []),
    ]
    return "\n".join([*lines, "", *_fuzzed(), *_long()]) + "\n"


def _fuzzed() -> list[str]:
    file = RESULTS / "fuzz.json"
    if not file.is_file():
        return []
    fuzz = json.loads(file.read_text("utf-8"))
    rounds = [fuzz[k] for k in sorted(fuzz) if k.startswith("rss_after_round")]
    return [
        "## Readers and corrupt files",
        "",
        f"{fuzz['inputs']:,} inputs, {fuzz['crashes']} crashes; every error one sentence. Memory",
        f"of the process: {fuzz['rss_at_start_mib']:.0f} MiB at the start, "
        f"{' and '.join(f'{r:.0f}' for r in rounds)} MiB after the rounds, "
        f"{fuzz['rss_peak_mib']:.0f} MiB at its peak.",
        "",
        "| reader | inputs | accepted | rejected |",
        "|---|---|---|---|",
        *(
            f"| {name} | {r['inputs']:,} | {r['accepted']:,} | {r['refused']:,} |"
            for name, r in fuzz["readers"].items()
        ),
        "",
    ]


def _long() -> list[str]:
    file = RESULTS / "long-runs.json"
    if not file.is_file():
        return []
    runs = json.loads(file.read_text("utf-8"))
    rows = []
    for run in runs:
        stored = run["stored_bytes"]
        drift = "" if run["drift"] is None else f"{run['drift']:.1e}"
        rows.append(
            f"| {run['method']} | {_mb(stored)} | {_mb(run['predicted_bytes'])} "
            f"| {run['directions'] or ''} | {drift} | {_mb(run['resident_growth_bytes'])} "
            f"| {_mb(run['accounted_bytes'])} | {run['step_ms_first']:.1f} "
            f"| {run['step_ms_last']:.1f} | {run['step_ms_predicted']:.1f} |"
        )
    return [
        f"## {runs[0]['tasks']} tasks",
        "",
        f"Rotated digits, {runs[0]['parameters']:,} parameters, one seed, with checkpoints. Stored",
        "and predicted: the method's state at the end, in MB. Drift: max |V Vᵀ − I|. Growth and",
        "explained: memory of the process since the first tenth of the tasks, and its part that is",
        "the method's state or test sets, in MB. Milliseconds of processor time per step: in the",
        "first and in the last tenth of the tasks, and predicted by a straight line through the",
        "first half; the problems of GEM and GEM-NT grow faster than that. OGD and PCA-OGD load a",
        "compiler once they have many directions: 144 MB that are not explained here, and that do",
        "not grow.",
        "",
        "| method | stored | predicted | directions | drift | growth | explained "
        "| ms first | ms last | ms predicted |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *rows,
    ]


def _mb(count: int | None) -> str:
    return "not in the trace" if count is None else f"{count / 1e6:.2f}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--only", choices=["engines"], help="inject only these faults")
    parser.add_argument("--table", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / "faults.json"
    if not arguments.table:
        whole = arguments.only is None
        found = inject(arguments.kills) if whole else json.loads(file.read_text("utf-8"))
        found["kinds"] |= inject_into_engines(max(2, arguments.kills // 10))
        file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    (RESULTS / "README.md").write_text(table(), "utf-8")
    print((RESULTS / "README.md").read_text("utf-8"))


if __name__ == "__main__":
    main()
