"""How long readers wait for ranks: ours beside what they would use instead.

    first launch      import torch in the fork server, start 4 ranks, run an empty function
    later launches    the same with the server running
    %%ranks cell      an empty cell on a warm pool
    spawn             torch.multiprocessing.spawn with init_process_group
    torchrun          python -m torch.distributed.run of an empty script
    notebook_launcher accelerate's, where it is installed

Run it on an idle machine; every figure is the median of its repeats.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from picotron_edu.ranks import launch
from picotron_edu.ranks.launch import make_spec
from picotron_edu.ranks.pool import RankPool

RANKS = 4


def median(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def empty() -> None:
    pass


def join_group(rank: int, folder: str) -> None:
    """What every spawned worker must do itself."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    dist.destroy_process_group()


def spawn() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(join_group, args=(folder,), nprocs=RANKS)  # type: ignore[attr-defined]


def torchrun() -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "empty.py"
        script.write_text(
            "import torch.distributed as d; d.init_process_group('gloo'); d.destroy_process_group()"
        )
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run(
            [*command, f"--nproc-per-node={RANKS}", str(script)], check=True, capture_output=True
        )


def notebook_launcher() -> None:
    """In a process of its own: it refuses to run where torch has been used before."""
    code = (
        "from accelerate import notebook_launcher\n"
        f"notebook_launcher(lambda: None, num_processes={RANKS}, use_port='29511')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def main() -> None:
    rows: list[tuple[str, float, str]] = []
    rows.append(("first launch", median(lambda: launch(empty, quiet=True), 1), "goal 3 s"))
    rows.append(("later launches", median(lambda: launch(empty, quiet=True), 15), "goal 0.2 s"))
    with RankPool(RANKS, make_spec(RANKS, None, None, None, 0)) as pool:
        cell = {"source": "pass", "name": "<ranks cell 0>", "trace": False}
        pool.run("cell", cell, 60)
        rows.append(
            ("%%ranks cell, warm", median(lambda: pool.run("cell", cell, 60), 50), "goal 20 ms")
        )
    ours = rows[1][1]
    rows.append(("torch.multiprocessing.spawn", median(spawn, 3), ""))
    rows.append(("torchrun", median(torchrun, 3), ""))
    if importlib.util.find_spec("accelerate"):
        rows.append(("accelerate.notebook_launcher", median(notebook_launcher, 3), ""))
    print(f"{RANKS} ranks, an empty function")
    for name, seconds, goal in rows:
        beside = goal or f"{seconds / ours:.0f} × later launches"
        print(f"  {name:30} {seconds * 1e3:8.1f} ms   {beside}")


if __name__ == "__main__":
    main()
