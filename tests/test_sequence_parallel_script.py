"""Chapter 06's script: the same file under python, with --nproc, and under torchrun."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from picotron_edu.presets import LlamaConfig

ROOT = Path(__file__).parent.parent
SCRIPT = [str(ROOT / "notebooks/06_sequence_parallel.py")]
SMALL = [
    *("--steps", "3", "--num-hidden-layers", "1", "--hidden-size", "32", "--device", "cpu"),
    *("--intermediate-size", "48", "--num-attention-heads", "8", "--num-key-value-heads", "2"),
    *("--sequence-length", "32", "--micro-batch-size", "2", "--accumulation", "2"),
    *("--check-steps", "2"),
]
THREE = [  # ranks: the vocabulary does not divide
    *("--hidden-size", "48", "--num-attention-heads", "6", "--num-key-value-heads", "3"),
    *("--sequence-length", "33", "--nproc", "3"),
]
ONE_HEAD = ["--num-attention-heads", "4", "--precision", "bfloat16"]  # on each of four ranks
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
        (PYTHON, [*THREE, "--recompute", "full", "--loss-chunks", "3"], 3),
        ([*TORCHRUN, "4"], [*ONE_HEAD, "--no-regather", "--loss-chunks", "4"], 4),  # 2 key heads
    ],
    ids=["one rank", "nproc 3", "torchrun 4"],
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


def test_there_are_no_flags_for_ranks_that_do_not_share_the_batch():
    done = run([*PYTHON, *SCRIPT, "--zero", "1"])
    assert done.returncode == 2 and "unrecognized arguments: --zero 1" in done.stderr


def test_a_formula_that_does_not_hold_is_one_line(monkeypatch, capsys):
    script = runpy.run_path(SCRIPT[0])
    wrong = script["Result"]([1.0], [1.0], [0.0] * 5)
    monkeypatch.setitem(script["main"].__globals__, "run", lambda config, data: wrong)
    assert script["main"](script["Config"](steps=1)) == 1
    told = capsys.readouterr()
    count = LlamaConfig.from_preset("tiny", vocab_size=256).num_parameters()
    assert not told.out and told.err.endswith(
        f"_parallel.py: error: weights: 0 counted, {4 * count:,} by the formula\n"
    )
