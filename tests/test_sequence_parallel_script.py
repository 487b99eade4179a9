"""Chapter 06's script: the same file under python, with --nproc, and under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = [str(ROOT / "notebooks/06_sequence_parallel.py")]
SMALL = [
    *("--steps", "3", "--num-hidden-layers", "1", "--hidden-size", "32", "--device", "cpu"),
    *("--intermediate-size", "48", "--num-attention-heads", "8", "--num-key-value-heads", "2"),
    *("--sequence-length", "32", "--micro-batch-size", "2", "--accumulation", "2"),
    *("--check-steps", "2"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]
PYTHON = [sys.executable]


def run(command: list[str]) -> subprocess.CompletedProcess:
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # tiny tensors only wait for more
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=one_thread
    )


@pytest.mark.parametrize(
    ("start", "flags", "n"),
    [
        (PYTHON, [], 1),
        (PYTHON, ["--nproc", "2", "--recompute", "full", "--loss-chunks", "3"], 2),
        ([*TORCHRUN, "4"], ["--precision", "bfloat16", "--no-regather"], 4),  # 2 key heads
    ],
    ids=["one rank", "nproc 2", "torchrun 4"],
)
def test_the_sequence_is_cut_and_the_formulas_hold(start, flags, n):
    done = run([*start, *SCRIPT, *SMALL, *flags])
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert f"{n} rank{'s' * (n > 1)}, one model" in done.stdout
    counted, formula, tensor = (rows[name] for name in ("counted", "formula", "tensor"))
    assert counted == formula  # weights, gradients, optimizer, activations, sent
    assert (formula[:6] == tensor[:6]) and (formula[6:] == tensor[6:]) == (n == 1)
    assert "losses and gradient norms of 2 steps are those of one rank" in done.stdout


def test_what_the_reader_can_mend_is_one_line():
    done = run([*PYTHON, *SCRIPT, *SMALL, "--nproc", "4", "--sequence-length", "30"])
    told = [line for line in done.stderr.splitlines() if "06_sequence_parallel.py: error: " in line]
    assert done.returncode == 2, done.stderr
    assert len(told) == 1 and "a sequence of 30 tokens is not divisible by world=4" in told[0]
