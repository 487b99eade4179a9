"""Chapter 04's script: the same file under python, with --nproc, and under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = [str(ROOT / "notebooks/04_zero.py")]
SMALL = [
    *("--steps", "2", "--num-hidden-layers", "1", "--hidden-size", "16"),
    *("--intermediate-size", "24", "--sequence-length", "64"),
    *("--micro-batch-size", "2", "--accumulation", "2", "--device", "cpu"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


@pytest.mark.parametrize(
    ("command", "ranks", "stages"),
    [
        ([sys.executable, *SCRIPT], 1, [0, 1, 2, 3]),
        (
            [sys.executable, *SCRIPT, "--nproc", "2", "--zero", "3", "--precision", "bfloat16"],
            2,
            [0, 3],
        ),
        ([*TORCHRUN, "4", *SCRIPT], 4, [0, 1, 2, 3]),
    ],
    ids=["alone", "nproc 2", "torchrun 4"],
)
def test_each_stage_is_counted_beside_its_formula_and_trains_the_same(command, ranks, stages):
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # tiny tensors only wait for more
    done = subprocess.run(
        [*command, *SMALL], capture_output=True, text=True, timeout=100, cwd=ROOT, env=one_thread
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ranks} rank{'s' * (ranks > 1)}, " in done.stdout
    assert [f"stage {s} " in done.stdout for s in range(4)] == [s in stages for s in range(4)]
    assert "equal to the formulas to the byte; the losses agree to" in done.stdout


def test_what_the_reader_can_mend_is_one_line(tmp_path):
    (tmp_path / "a.txt").write_text("too short")
    command = [sys.executable, *SCRIPT, *SMALL, "--data", str(tmp_path / "a.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert "04_zero.py: error: " in done.stderr and "is too short" in done.stderr
    assert "Traceback" not in done.stderr
