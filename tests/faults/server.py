"""Runs in processes that can be killed: one process imports torch once and forks them.

    python -m tests.faults.server

reads one JSON object a line (the case, the method and the folder of a run), forks a process that
does the run, kills it after `kill_after` seconds if it says so, and answers with how it ended.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import forgetless
from forgetless import (
    AGEM,
    DER,
    DERPP,
    ER,
    ERACE,
    EWC,
    GEM,
    GEMNT,
    GPM,
    OGD,
    PCAOGD,
    SGD,
    SGP,
    SI,
    AdamNSCL,
    Joint,
    KFACLaplace,
    KronEWC,
    KronOGD,
    LwF,
    Training,
    fit,
)

ROOT = Path(__file__).parents[2]
METHODS = {
    "sgd": SGD(),
    "joint": Joint(batch_size=8),
    "ewc": EWC(strength=5.0),
    "a-gem": AGEM(memory=8, batch_size=4),
    "gem": GEM(memory=4),
    "gem-nt": GEMNT(memory=4),
    "ogd": OGD(samples=6),
    "pca-ogd": PCAOGD(components=5, samples=30),
    "kron-ogd": KronOGD(energy=0.9, samples=30),
    "kfac-laplace": KFACLaplace(samples=30),
    "kron-ewc": KronEWC(strength=0.1, tolerance=1e-3, samples=30),
    "gpm": GPM(threshold=0.8, samples=30),
    "sgp": SGP(threshold=0.8, samples=30),
    "adam-nscl": AdamNSCL(ratio=100.0, samples=30),
    "si": SI(),
    "lwf": LwF(),
    "er": ER(buffer=12, batch_size=4),
    "er-ace": ERACE(buffer=12, batch_size=4),
    "der": DER(buffer=12, batch_size=4),
    "der++": DERPP(buffer=12, batch_size=4),
}
EVERY_STEP = 1e-9  # minutes between checkpoints
SEEDS = 2
REFUSED = 2  # how a process ends that is not let do the run


def small_scenario() -> forgetless.Scenario:
    """Three tasks of rotated digits, sixteen steps each."""
    return forgetless.scenario("rotated-digits", tasks=3, train_per_class=6, step_degrees=30)


def run(tasks: forgetless.Scenario, case: dict[str, Any]) -> None:
    """The run of a case, from the beginning or from its latest checkpoint."""
    fit(
        tasks,
        METHODS[case["method"]],
        seeds=SEEDS,
        training=Training(lr=0.05, epochs=2, batch_size=8),
        out=case["out"],
        checkpoint_every=case.get("every", EVERY_STEP),
        **case.get("options", {}),
    )


def serve() -> None:
    """Fork a process for every case on standard input."""
    torch.set_num_threads(1)
    tasks = small_scenario()
    tasks.task(0, [0])
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                run(tasks, json.loads(line))
                os._exit(0)
            except forgetless.TraceError:
                os._exit(REFUSED)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        kill_after = json.loads(line).get("kill_after")
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(pid, signal.SIGKILL)  # at worst it has ended and waits to be looked after
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


class Server:
    """The other end of `serve`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def run(self, method: str, out: Path, kill_after: float | None = None, **rest: Any) -> int:
        """How a run ended: 0, or minus the signal; with `kill_after` it is killed by then."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        case = {"method": method, "out": str(out), "kill_after": kill_after, **rest}
        print(json.dumps(case), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


@contextmanager
def server() -> Iterator[Server]:
    """A server for the block."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])
    }
    command = [sys.executable, "-m", "tests.faults.server"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Server(process)
        assert process.stdin is not None
        process.stdin.close()


def difference(found: Path, expected: Path) -> str:
    """The first thing in which two traces differ, timings apart; empty if there is none."""
    one, other = forgetless.load_trace(found), forgetless.load_trace(expected)
    for name in ("scenario", "method", "seeds", "tasks", "config", "versions", "status"):
        if getattr(one, name) != getattr(other, name):
            return name
    if one.accuracy.tobytes() != other.accuracy.tobytes():
        return "accuracy"
    files = [
        {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()}
        for folder in (found, expected)
    ]
    if files[0] != files[1]:
        return f"files {sorted(files[0] ^ files[1])}"
    for file in sorted(files[0] - {"trace.json"}):
        if (found / file).read_bytes() != (expected / file).read_bytes():
            return file
    return "" if np.isfinite(one.accuracy[:, -1]).all() else "accuracy is not finite"


def killed_runs(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill runs of every method at random moments, let them go on, and compare with whole ones.

    Returns:
        how many were killed, how many of them while a file was being written (one was left half
        written), and the methods whose trace differs from that of an uninterrupted run.
    """
    moments = random.Random(seed)
    killed = during_write = finished = 0
    lost: dict[str, str] = {}
    with server() as runs:
        for number, method in enumerate(METHODS):
            whole, again = folder / f"{method}-whole", folder / method
            started = time.monotonic()
            assert runs.run(method, whole) == 0
            length = time.monotonic() - started
            rounds = kills // len(METHODS) + (number < kills % len(METHODS))
            while rounds:
                was_killed = runs.run(method, again, moments.uniform(0, length)) != 0
                rounds -= was_killed
                killed += was_killed
                during_write += any(again.rglob(".*.*.*"))
                if _is_complete(again):
                    # It was done before the blow: its result counts, and another is begun.
                    if was_killed:
                        assert runs.run(method, again) == REFUSED  # and tidies up
                    lost |= _compared(method, again, whole)
                    finished += 1
                    again = folder / f"{method}-{finished}"
            assert runs.run(method, again) == 0
            lost |= _compared(method, again, whole)
    return {"killed": killed, "during_write": during_write, "lost": lost, "outran": finished}


def _is_complete(folder: Path) -> bool:
    record = folder / "trace.json"
    return record.is_file() and json.loads(record.read_text("utf-8"))["status"] == "complete"


def _compared(method: str, found: Path, expected: Path) -> dict[str, str]:
    what = difference(found, expected)
    return {f"{method} {found.name}": what} if what else {}


if __name__ == "__main__":
    serve()
