"""Chapter 07's script: the same file under python, with --nproc, and under torchrun."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = [str(ROOT / "notebooks/07_context_parallel.py")]
SMALL = [
    *("--steps", "2", "--num-hidden-layers", "1", "--hidden-size", "32", "--device", "cpu"),
    *("--intermediate-size", "48", "--num-attention-heads", "8", "--num-key-value-heads", "4"),
    *("--sequence-length", "64", "--micro-batch-size", "2", "--accumulation", "2"),
    *("--check-steps", "2"),
]
ONE_HEAD = ["--num-attention-heads", "1", "--num-key-value-heads", "1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]
PYTHON = [sys.executable]


def run(command: list[str]) -> subprocess.CompletedProcess:
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # tiny tensors only wait for more
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=one_thread
    )


@pytest.mark.parametrize(
    ("start", "flags", "pairs"),
    [
        (PYTHON, [], [3 * 32**2]),
        (PYTHON, ["--nproc", "2", "--order", "contiguous"], [1024, 2048]),
        (PYTHON, ["--nproc", "2", "--kind", "all_gather", "--recompute", "full"], [1280] * 2),
        (PYTHON, ["--kind", "all_gather", *ONE_HEAD], [3 * 32**2]),
        ([*TORCHRUN, "4"], ["--kind", "ulysses", "--precision", "bfloat16"], [1024] * 4),
    ],
    ids=["one rank", "contiguous ring", "all-gather", "one head", "torchrun 4 ulysses"],
)
def test_ranks_share_each_sequence_and_the_formulas_hold(start, flags, pairs):
    done = run([*start, *SCRIPT, *SMALL, *flags])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.rsplit(maxsplit=len(pairs)) for line in done.stdout.splitlines()]
    counted = next(line for line in lines if line[0] == "pairs computed, masked too")
    assert counted[1:] == [f"{n:,}" for n in pairs]
    assert "bytes kept, of a micro-batch" in done.stdout and "bytes sent, in a step" in done.stdout
    assert "losses and gradient norms of 2 steps are those of one rank" in done.stdout


def test_a_count_that_is_not_its_formula_is_one_line(capsys, monkeypatch):
    spec = importlib.util.spec_from_file_location("script_07", SCRIPT[0])
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "script_07", script)  # where dataclasses look for its types
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "sent_by", lambda config, shape, n: 1234.0)
    small = {"num_hidden_layers": 1, "sequence_length": 32, "steps": 1, "check_steps": 0}
    assert script.main(script.Config(**small, device="cpu")) == 1
    told = "bytes sent, in a step: 0 counted on rank 0, 1,234 by the formula"
    assert capsys.readouterr().err == f"07_context_parallel.py: error: {told}\n"


def test_what_the_reader_can_mend_is_one_line():
    done = run([*PYTHON, *SCRIPT, *SMALL, "--nproc", "3"])
    told = [line for line in done.stderr.splitlines() if "07_context_parallel.py: error: " in line]
    assert done.returncode == 2, done.stderr
    assert len(told) == 1 and "64 tokens is not divisible by 2·cp=6 (zigzag)" in told[0]


def test_there_is_no_flag_for_what_needs_replicas():
    done = run([*PYTHON, *SCRIPT, "--zero", "2"])
    assert done.returncode == 2 and "unrecognized arguments: --zero 2" in done.stderr
