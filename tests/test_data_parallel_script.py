"""Chapter 03's script: the same file under python, with --nproc, and under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = [str(ROOT / "notebooks/03_data_parallel.py")]
SMALL = [
    *("--steps", "3", "--num-hidden-layers", "1", "--hidden-size", "16"),
    *("--intermediate-size", "24", "--sequence-length", "64", "--device", "cpu"),
    *("--micro-batch-size", "2", "--accumulation", "2", "--check-steps", "2", "--repeats", "1"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]


def run(command: list[str]) -> subprocess.CompletedProcess:
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # tiny tensors only wait for more
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=one_thread
    )


@pytest.mark.parametrize(
    ("command", "n"),
    [
        ([sys.executable, *SCRIPT], 1),
        ([sys.executable, *SCRIPT, "--nproc", "2"], 2),
        ([*TORCHRUN, "4", *SCRIPT], 4),
    ],
    ids=["one rank", "nproc 2", "torchrun 4"],
)
def test_ranks_share_the_batch_and_keep_the_promises(command, n):
    done = run([*command, *SMALL])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{n} × 3 steps, {3 * 2 * 2 * 64 * n:,} tokens" in done.stdout
    assert done.stdout.count("loss on text it has not seen") == 1
    promises = f"{n} ranks × 2 micro-batches = 1 rank × {2 * n}: losses and gradient norms of 2"
    assert (promises in done.stdout) == (n > 1)
    assert (f"All {n} replicas hold bit-identical weights" in done.stdout) == (n > 1)
    for mode in ("naive", "overlap", "bucketed"):
        assert (f"\n{mode} " in done.stdout) == (n > 1)


def test_what_the_reader_can_mend_is_one_line():
    done = run([sys.executable, *SCRIPT, "--nproc", "2", *SMALL, "--lr", "1e30"])
    told = [line for line in done.stderr.splitlines() if "03_data_parallel.py: error: " in line]
    assert done.returncode == 2, done.stderr
    assert len(told) == 1 and "try a lower lr (1e+30)" in told[0]
