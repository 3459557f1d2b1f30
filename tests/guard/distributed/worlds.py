"""Several processes of gloo on this machine, and what each of them left behind."""

import os
import time
import traceback
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Of a collective; what waits longer has lost a process.
LIMIT = timedelta(seconds=60)


def _process(rank: int, size: int, folder: Path, work, arguments, limit: timedelta) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=limit)
    try:
        work(rank, folder, *arguments)
    except BaseException:
        (folder / f"failed-{rank}").write_text(traceback.format_exc())
        raise
    dist.destroy_process_group()


@cache
def _server():
    """Forks processes that have imported everything already, which takes longer than the work."""
    server = mp.get_context("forkserver")
    server.set_forkserver_preload(
        ["tests.guard.distributed.test_deaths", "tests.guard.distributed.works"]
    )
    return server


def processes(size: int, folder: Path, work, *arguments, limit: timedelta = LIMIT):
    """Start `work(rank, folder, *arguments)` on that many processes."""
    folder.mkdir(parents=True, exist_ok=True)
    started = [
        _server().Process(target=_process, args=(rank, size, folder, work, arguments, limit))
        for rank in range(size)
    ]
    for process in started:
        process.start()
    return started


def ended(started, seconds: float = 110) -> list[int]:
    """Their exit codes; those that are still there are ended, and count as such."""
    until = time.monotonic() + seconds
    for process in started:
        process.join(max(0.1, until - time.monotonic()))
    late = [process.is_alive() for process in started]
    for process in started:
        if process.is_alive():
            process.kill()
            process.join()
    assert not any(late), f"processes did not end: {late}"
    return [process.exitcode for process in started]


def world(size: int, folder: Path, work, *arguments) -> None:
    """Run the work to its end; a failure of any process is the caller's."""
    codes = ended(processes(size, folder, work, *arguments))
    failed = sorted(folder.glob("failed-*"))
    assert not failed, failed[0].read_text()
    assert codes == [0] * size
