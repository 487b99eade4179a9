"""Chapter 01's script: the same file under python, with --nproc, and under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = [str(ROOT / "notebooks/01_single_gpu.py")]
SMALL = [
    *("--steps", "3", "--num-hidden-layers", "1", "--hidden-size", "16"),
    *("--intermediate-size", "24", "--sequence-length", "64"),
    *("--micro-batch-size", "2", "--accumulation", "2", "--device", "cpu"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]


def output_of(command: list[str]) -> str:
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # tiny tensors only wait for more
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=one_thread
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_rank_trains_reports_and_writes():
    text = output_of([sys.executable, *SCRIPT, *SMALL])
    assert "3 steps, 768 tokens" in text
    assert "MFU" in text and "no recompute" in text and "peak memory" in text
    assert "loss on text it has not seen" in text and "\nThe " in text
    assert "replicas" not in text


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, *SCRIPT, "--nproc", "2"],
        [*TORCHRUN, "2", *SCRIPT],
        [*TORCHRUN, "4", *SCRIPT],
    ],
    ids=["nproc 2", "torchrun 2", "torchrun 4"],
)
def test_several_ranks_are_equal_replicas_and_rank_0_alone_speaks(command):
    text = output_of([*command, *SMALL])
    count = 4 if "4" in command else 2
    assert f"All {count} replicas hold bit-identical weights" in text
    assert text.count("loss on text it has not seen") == 1


@pytest.mark.parametrize(
    ("ranks", "content", "flags", "reason"),
    [
        ([], "too short", [], "is too short"),
        (["--nproc", "2"], "text " * 500, ["--lr", "1e30"], "try a lower lr (1e+30)"),
    ],
    ids=["short data", "nan on two ranks"],
)
def test_what_the_reader_can_mend_is_one_line(tmp_path, ranks, content, flags, reason):
    (tmp_path / "a.txt").write_text(content)
    command = [sys.executable, *SCRIPT, *ranks, *SMALL, "--data", str(tmp_path / "a.txt"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    told = [line for line in done.stderr.splitlines() if "01_single_gpu.py: error: " in line]
    assert done.returncode == 2, done.stderr
    assert len(told) == 1 and reason in told[0] and "Traceback" not in done.stderr
